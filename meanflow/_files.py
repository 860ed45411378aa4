"""Files that are either whole or absent: write under another name, then rename.

A process can be killed at any moment. A rename within one folder is atomic, so a reader sees the old content or
the new one and never half of it.
"""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART = ".part-"  # names that start with this are unfinished, and may be deleted when nobody is writing


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a fresh path beside ``path`` to write to; when the block ends well it is renamed to ``path``.

    Args:
        path: final name of a file, which may exist and is then replaced, or of a folder, which must not exist.
            Its parent folder must exist (else FileNotFoundError).

    Yields:
        A path in the same folder with the same suffix, different for every call, at which a file or a folder is
        to be created. When the block raises, what was written there is deleted and ``path`` is as before.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_write(folder / "a.txt") as part:
    ...     _ = part.write_text("whole")
    >>> [p.name for p in folder.iterdir()], (folder / "a.txt").read_text()
    (['a.txt'], 'whole')
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")
    # the end of the name alone, so that a name which is long but allowed stays so
    part = path.with_name(f"{PART}{uuid.uuid4().hex}-{path.name[-80:]}")
    try:
        yield part
        part.replace(path)
    except BaseException:
        # also on KeyboardInterrupt: an unfinished file must not stay behind
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
        raise
