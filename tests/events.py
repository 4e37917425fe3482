"""Reads the event files of TensorBoard."""

import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog


def points(folder: Path, hide: bool = True) -> dict[str, list[tuple[int, Any]]]:
    """(step, value or text) of each tag of a folder, in the order written.

    `hide`: without the points that a later process replaces, as TensorBoard shows them.
    """
    tags = defaultdict(list)
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        at = 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + size])
            at += size + 16
            if hide and event.session_log.status == SessionLog.START:
                for written in tags.values():
                    written[:] = [point for point in written if point[0] < event.step]
            for value in event.summary.value:
                text = b"".join(value.tensor.string_val).decode()
                tags[value.tag].append((event.step, text or value.simple_value))
    return tags
