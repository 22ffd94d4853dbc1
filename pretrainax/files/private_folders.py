"""Creates folders that only the current user can read or write, for files that the program trusts."""

import os
import stat

from pretrainax.files.errors import UserError


def private_folder(path: str) -> str:
    """Creates a folder with mode 0700 (only this user), or sets this mode on an existing folder; returns `path`.

    Raises:
      UserError: `path` is not a folder, belongs to another user, or cannot be created.
    """
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            raise UserError(f"{path} is a link: the program stores private files there, so it must be a folder")
        if status.st_uid != os.geteuid():
            raise UserError(
                f"{path} belongs to user {status.st_uid}, but this is user {os.geteuid()}: the program stores private "
                "files there. Remove it, or set XDG_CACHE_HOME to your own folder"
            )
        if status.st_mode & 0o077:
            os.chmod(path, 0o700)
    except OSError as e:
        raise UserError(
            f"{path} cannot be made a private folder ({e.strerror}): set XDG_CACHE_HOME to another folder"
        ) from e
    return path
