"""ImageNet for Table 3: images of a folder, crops, the fully convolutional form, on made-up files."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from meanflow_papers.catalogue import CATALOGUE
from meanflow_papers.reproduce import run_entry
from meanflow_papers.unitization import imagenet


@pytest.fixture
def folder(tmp_path):
    """Four images of each of three classes in both parts, of several shapes, one of them gray."""
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("n02", "n01", "n03"):
            (tmp_path / part / name).mkdir(parents=True)
            for k, shape in enumerate([(70, 90, 3), (90, 70, 3), (80, 80), (64, 200, 3)]):
                image = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
                image.save(tmp_path / part / name / f"{k}.JPEG")
        (tmp_path / part / "n01" / "notes.txt").write_text("no image")
    return tmp_path


def test_images_of_a_folder(folder):
    data = imagenet.image_folder(folder, "train")
    assert data.classes == ("n01", "n02", "n03") and len(data.paths) == 12
    assert np.bincount(data.labels).tolist() == [4, 4, 4] and data.image(2).mode == "RGB"
    assert len(imagenet.image_folder(folder, "val", 5).paths) == 5
    with pytest.raises(FileNotFoundError, match="a folder of images for each class"):
        imagenet.image_folder(folder, "test")


def test_crops_and_scale_augmentation_are_parts_of_the_resized_image():
    """A ramp of colors tells where a crop was taken and how the image was resized."""
    across = np.broadcast_to(np.linspace(0, 255, 300)[None, :, None], (250, 300, 3)).astype(np.uint8)
    image = Image.fromarray(across)
    assert imagenet.resized(image, 500).size == (600, 500)
    found = imagenet.crops(image)
    assert found.shape == (42, 224, 224, 3)  # 2 + 4 x 10
    np.testing.assert_allclose(found[1], found[0][:, ::-1])  # mirrored
    corners = found[2:12:2, 0, 0, 0]  # of the scale 256: center, and the four corners
    ramp = imagenet.pixels(imagenet.resized(image, 256))[0, :, 0]
    left, right = ramp[0], ramp[-224]
    np.testing.assert_allclose(corners[1:], [left, right, left, right], atol=1e-6)
    assert left < corners[0] < right
    one = imagenet.scale_augmented(image, np.random.default_rng(0), 224, (256, 480))
    assert one.shape == (224, 224, 3)
    slope = np.abs(np.diff(one[100, :, 0])).mean() * 0.225 * 255  # 255/299 a pixel, less by the scale
    assert 255 / 299 * 250 / 480 * 0.95 < slope < 255 / 299 * 250 / 256 * 1.05


def test_the_fully_convolutional_form_is_the_network_where_the_image_has_the_training_size():
    network = imagenet.ImageNetResNet(
        imagenet.NORMS["unitization"], 3, blocks=(1, 1, 1, 1), width=4, side=64, rngs=nnx.Rngs(0)
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 64, 3)), jnp.float32)
    np.testing.assert_allclose(network.everywhere(x), network(x), rtol=1e-5, atol=1e-6)
    assert network.everywhere(jnp.zeros((1, 96, 160, 3))).shape == (1, 3)
    # n of Algorithm 2 is that of the training size: 16 x 16, 8 x 8, ... pixels
    assert [block.norms[0].n for block in network.blocks] == [256, 256, 64, 16]
    assert [block.norms[2].n for block in network.blocks] == [256, 64, 16, 4]


@pytest.mark.slow
def test_table_3_on_made_up_files(folder, tmp_path):
    record = run_entry(CATALOGUE["003/table-3"], tmp_path / "out", data=str(folder))
    assert record["figures"] and record["criteria"] == [], record["error"]
    assert "nothing follows" in record["finding"]
