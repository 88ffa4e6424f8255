"""Small copies of the images of prompts, for the page."""

import base64
import functools
import io
from pathlib import Path

from rlhf_data.errors import RlhfError
from rlhf_data.images.files import read_image

_PIXELS = 128  # of the longer side; the copy takes about 4 KB


@functools.lru_cache(maxsize=4096)
def thumbnail(path: str) -> dict[str, str]:
    """Return an image's path, and as `src` a data URL of a small copy, unless its file is gone or cannot be read."""
    if not Path(path).is_file():  # a device or a pipe in a damaged record would be read without an end
        return {"path": path}
    try:
        image = read_image(path, "a rollout")
    except RlhfError:
        return {"path": path}
    image.thumbnail((_PIXELS, _PIXELS))
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=80)
    return {"path": path, "src": f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"}
