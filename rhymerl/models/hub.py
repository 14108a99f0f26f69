"""A check whether the Hugging Face hub has what a setting names, before libraries ask again for each file."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from rhymerl.errors import ConfigError

_TIMEOUT_S = 10.0

Kind = Literal["model", "dataset"]


def look_up(name: str, setting: str, *, kind: Kind) -> bool:
    """True when the hub answers; False when it cannot be asked, but an earlier download is on the disk.

    Raises ConfigError, which begins with `setting`, when it has nothing of that name, or cannot be asked and nothing is
    here.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    client: Any = import_module("huggingface_hub.utils")

    what = f"{setting}={name!r}: no such file or directory, and the Hugging Face hub"
    try:
        client.validate_repo_id(name)
        url = f"{constants.ENDPOINT}/api/{kind}s/{name}"
        client.hf_raise_for_status(client.get_session().get(url, headers=client.build_hf_headers(), timeout=_TIMEOUT_S))
    except HFValidationError as error:
        raise ConfigError(f"{what} has no such names: {str(error).splitlines()[0]}") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"{what} has no {kind} of that name that you may read") from error
    except HfHubHTTPError:
        return True  # it is there; let the library see what it says of the files
    except Exception as error:  # no connection, in the words of whichever HTTP library the hub's client has
        if _is_here(name, kind):
            return False
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{what} cannot be asked ({reason}); nothing of it has been downloaded before") from error
    return True


def _is_here(name: str, kind: Kind) -> bool:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}", "snapshots")
    prepared = Path(
        os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"), name.replace("/", "___")
    )
    return any(folder.glob("*/*")) or (kind == "dataset" and prepared.is_dir())
