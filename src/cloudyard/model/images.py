"""Images: what they are made of, and what they say of the commands that run in them."""

from __future__ import annotations

from msgspec import Struct, field


class ImageConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an image says of the commands that run in it."""

    env: dict[str, str] = field(
        default_factory=lambda: {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
        }
    )
    cwd: str = "/root"
    user: str = "root"
    probe: list[str] = field(default_factory=lambda: ["/bin/true"])
    """Run once when a sandbox is made; creating returns only after it ended well."""


class Image(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image: layers from the lowest up, by content, and a config. `layers` are names of EROFS files in the
    depot."""

    name: str
    layers: list[str]
    config: ImageConfig = field(default_factory=ImageConfig)
    created_at: float = 0.0
    size_bytes: int = 0
