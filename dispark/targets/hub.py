"""Gets a model's safetensors, config and tokenizer from a Hugging Face repository into the hub's own cache.

Nothing else is taken: no pickled weights, no code. Large files are named by their sha256 in that cache, so they are
checked against it. This module does not know whether the loop can drive the model, except through the check that it is
handed, which runs on config.json alone, before gigabytes are fetched.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dispark.targets.cache import file_sha256
from dispark.targets.quiet import first_line

log = logging.getLogger(__name__)

_SHA256_NAME = re.compile(r"[0-9a-f]{64}")


def snapshot(
    repo_id: str, revision: str, patterns: Sequence[str], is_forced: bool, check_config: Callable[[Path], Any]
) -> list[Path]:
    """Downloads what is missing and returns the files, in a folder whose name is the commit.

    Args:
        repo_id: "owner/name".
        revision: branch, tag, commit or "refs/pr/N".
        patterns: file name patterns to take, at the repository's top level only.
        is_forced: download anew even what the hub's cache has.
        check_config: called with the folder of config.json before the weights; its ValueError ends the download.

    Raises:
        ValueError: one line that names the config key: no such repository or revision, gated, offline, no safetensors.
    """
    check_config(_call(repo_id, revision, ["config.json"], is_forced))
    folder = _call(repo_id, revision, patterns, is_forced)
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ValueError(
            f"repo_id={repo_id}: revision {revision} has no *.safetensors files; "
            "choose a revision that has them (for example refs/pr/N of a conversion)"
        )
    broken = [path.name for path in shards if not _is_intact(path)]
    if broken and not is_forced:
        log.warning("%s: %s in the hub's cache is corrupt; downloading it again", repo_id, ", ".join(broken))
        return snapshot(repo_id, revision, patterns, True, check_config)
    if broken:
        raise ValueError(f"repo_id={repo_id}: {broken[0]} arrived with a wrong sha256")
    return sorted(path for path in folder.iterdir() if any(path.match(pattern) for pattern in patterns))


def download(repo_id: str, revision: str, patterns: Sequence[str]) -> Path:
    """The folder of a repository's top-level files that match, in the hub's own cache.

    Raises:
        ValueError: see `snapshot`; or a file arrived with a wrong sha256.
    """
    folder = _call(repo_id, revision, patterns, False)
    broken = [path for path in folder.iterdir() if not _is_intact(path)]
    if broken:
        folder = _call(repo_id, revision, patterns, True)
        if not all(_is_intact(folder / path.name) for path in broken):
            raise ValueError(f"repo_id={repo_id}: {broken[0].name} arrived with a wrong sha256")
    return folder


def _is_intact(path: Path) -> bool:
    """Compares a file with the sha256 that the hub's cache named it by; true where the cache keeps no such name."""
    name = path.resolve().name
    return _SHA256_NAME.fullmatch(name) is None or file_sha256(path) == name


def _call(repo_id: str, revision: str, patterns: Sequence[str], is_forced: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    where = f"repo_id={repo_id}"
    try:
        folder = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
            force_download=is_forced,
        )
    except errors.GatedRepoError as error:
        raise ValueError(f"{where}: is gated; accept its licence on its page, then run 'hf auth login'") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(f"{where}: no such repository, or it is private and you are not logged in") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"revision={revision}: {repo_id} has no such revision") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ValueError(
            f"{where}: not in the local hub cache and the hub can't be reached (offline?); "
            "connect, or choose another target.source"
        ) from error
    except Exception as error:  # transport errors come from whichever HTTP library is inside
        raise ValueError(f"{where}: the download failed: {first_line(error)}") from error
    return Path(folder)
