"""What to cite for what was used: the papers behind a model, a solver or a function, and the software underneath."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from types import FunctionType, ModuleType
from typing import Annotated, Any

from meanflow._boundary import checked, unchecked

WORKS = {
    "meanflow": "@software{meanflow, title={meanflow: how two-layer networks learn, as one flow equation}, "
    "author={{The meanflow maintainers}}, year={2026}}",
    "jax": "@software{jax, title={JAX: composable transformations of Python+NumPy programs}, "
    "author={Bradbury, James and Frostig, Roy and Hawkins, Peter and others}, year={2018}}",
    "diffrax": "@phdthesis{kidger2021, title={On Neural Differential Equations}, author={Kidger, Patrick}, "
    "year={2021}, school={University of Oxford}}",
    "optax": "@software{optax, title={The DeepMind JAX Ecosystem}, author={{DeepMind}}, year={2020}}",
    "mean field": "@article{mei2018, title={A Mean Field View of the Landscape of Two-layer Neural Networks}, "
    "author={Mei, Song and Montanari, Andrea and Nguyen, Phan-Minh}, year={2018}}",
    "filippov": "@book{filippov1988, title={Differential Equations with Discontinuous Righthand Sides}, "
    "author={Filippov, A. F.}, year={1988}}",
    "tangent kernel": "@inproceedings{jacot2018, title={Neural Tangent Kernel: Convergence and Generalization in "
    "Neural Networks}, author={Jacot, Arthur and Gabriel, Franck and Hongler, Cl{\\'e}ment}, year={2018}}",
    "univariate": "@inproceedings{williams2019, title={Gradient Dynamics of Shallow Univariate ReLU Networks}, "
    "author={Williams, Francis and Trager, Matthew and Silva, Claudio and Panozzo, Daniele and Zorin, Denis and "
    "Bruna, Joan}, year={2019}}",
    "manifold": "@article{ma2021, title={A Riemannian Mean Field Formulation for Two-layer Neural Networks with "
    "Batch Normalization}, author={Ma, Chao and Ying, Lexing}, year={2021}}",
    "normalized kernel": "@inproceedings{cai2024, title={Batch Normalization Alleviates the Spectral Bias in "
    "Coordinate Networks}, author={Cai, Zhicheng and Zhu, Hao and Shen, Qiu and Wang, Xinran and Cao, Xun}, "
    "year={2024}}",
    "decomposed": "@article{nachum2024, title={Batch Normalization Decomposed}, author={Nachum, Ido and Bondaschi, "
    "Marco and Gastpar, Michael and Khina, Anatoly}, year={2024}}",
    "unitizing": "@inproceedings{huang2020, title={An Internal Covariate Shift Bounding Algorithm for Deep Neural "
    "Networks by Unitizing Layers' Outputs}, author={Huang, You and Yu, Yuanlong}, year={2020}}",
}
# where something is defined says what it rests on
RESTS_ON = (
    (r"meanflow\.(flows|geometry)\b", "mean field"),
    (r"meanflow\.univariate\b", "univariate"),
    (r"BatchNorm|batchnorm_manifold|\.batchnorm$", "manifold"),
    (r"meanflow\.kernels\b", "tangent kernel"),
    (r"meanflow\.kernels\._batchnorm", "normalized kernel"),
    (r"meanflow\.depth\b|Re(center|scale)", "decomposed"),
    (r"[Uu]nitiz|meanflow\.transport\.(_)?(ics|bounds|critic)", "unitizing"),
    (r"^sliding$", "filippov"),
    (r"^diffrax\b|meanflow\.solvers\._continuous", "diffrax"),
    (r"^optax\b|meanflow\.solvers\._discrete", "optax"),
)


@checked
def citation(*used: Annotated[Any, unchecked("anything has a name")]) -> str:
    """Return BibTeX entries of what to cite for what was used, this software included.

    Args:
        used: models, functions, modules and solvers, for instance ``mf.lifted(), "sliding", mf.kernels.spectrum``.

    >>> import meanflow as mf
    >>> entries = mf.citation(mf.lifted(), "sliding").splitlines()
    >>> [entry.split(",")[0] for entry in entries]
    ['@software{meanflow', '@software{jax', '@article{mei2018', '@book{filippov1988', '@inproceedings{williams2019']
    """
    seen = [name for one in used for name in _homes(one)]
    keys = {key for pattern, key in RESTS_ON if any(re.search(pattern, name) for name in seen)}
    return "\n".join(entry for key, entry in WORKS.items() if key in keys | {"meanflow", "jax"})


def _homes(used: object) -> list[str]:
    """Return the dotted names of what something is and of what it holds: of a flow also its feature and its space."""
    if isinstance(used, str | ModuleType):
        return [used if isinstance(used, str) else used.__name__]
    named = used if isinstance(used, type | FunctionType) else type(used)
    # a flow holds a feature and a space, which say more than its class
    held = [] if named is used or not is_dataclass(used) else [getattr(used, f.name) for f in fields(used)]
    return [f"{one.__module__}.{one.__qualname__}" for one in (named, *map(type, held))]
