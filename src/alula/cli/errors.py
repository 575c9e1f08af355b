"""From exceptions to one sentence on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable

from alula.config import AlulaError

MISTAKE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141


def guarded(run: Callable[[], int]) -> int:
    """The exit code of `run`; errors that a user can mend are told in one sentence, faults of alula's own raise."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = run()
        sys.stdout.flush()
        return code
    except AlulaError as error:
        return _tell(str(error))
    except UnicodeDecodeError as error:
        return _tell(f"the input is not valid UTF-8 (byte {error.start}): re-encode it as UTF-8")
    except BrokenPipeError:
        # The reader has gone. Python would complain once more while closing stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:
        return _tell(_sentence(error))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


def _tell(sentence: str) -> int:
    print(f"alula: error: {' '.join(sentence.split())}", file=sys.stderr)
    return MISTAKE


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: object = None,
) -> None:
    """Alula's own warnings as one sentence; those of libraries are for their developers."""
    if category is UserWarning:
        print(f"alula: warning: {message}", file=sys.stderr)


def _sentence(error: OSError) -> str:
    where = f" at {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left on the disk{where}: free some, or set ALULA_CACHE to a folder on another disk"
    if error.errno == errno.ENOENT:
        return f"the file {error.filename} does not exist: check the path"
    return f"the system refused ({error.strerror or error}){where}: check path and permissions"
