"""Code that goes into a checkpoint folder, for readers who do not have attnres."""

from attnres.models.remote.write import CODE_FILE, check_remote, remote_code_text, remote_fields

__all__ = ["CODE_FILE", "check_remote", "remote_code_text", "remote_fields"]
