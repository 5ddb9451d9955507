"""Renders one chat template again and again, in a process forked by the compile server.

The socket brings lines of JSON. The first is the template's source, each other one the variables of
a rendering. Each is answered by an empty line when it has been read, and by a JSON object of
``text`` or ``error``. A rendering that passes a limit ends the process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import suppress

from jinja2 import Template

from .chat_template import new_chat_template

__all__ = ["MAX_RENDERED_CHARS", "RENDER_CPU_S", "serve_renders"]

RENDER_CPU_S = 1.0
"""Seconds of CPU that compiling a template, or one rendering, may take: honest ones take
milliseconds. Not of a clock, so that a busy machine refuses nothing."""

MAX_RENDERED_CHARS = 4 << 20
"""Four times the characters of the longest payload."""


def serve_renders(job: socket.socket) -> None:
    """Serve until the socket is closed."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also in the middle of C code
    template: Template | None = None
    with suppress(OSError), job, job.makefile("rwb") as lines:
        for line in lines:
            lines.write(b"\n")
            lines.flush()
            signal.setitimer(signal.ITIMER_PROF, RENDER_CPU_S)
            answer = {}
            try:
                if template is None:
                    template = new_chat_template(json.loads(line))
                else:
                    text = template.render(**json.loads(line))
                    if len(text) > MAX_RENDERED_CHARS:
                        raise ValueError(
                            f"its text is longer than {MAX_RENDERED_CHARS >> 20} Mi characters"
                        )
                    answer["text"] = text
            except MemoryError:
                os._exit(1)
            except Exception as error:  # a program of the checkpoint's: it may raise anything
                answer["error"] = " ".join(str(error).split()) or type(error).__name__
            data = json.dumps(answer).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            lines.write(data + b"\n")
            lines.flush()
