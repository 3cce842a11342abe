"""Where a user's keys and tokens usually lie: what a sandboxed tool cannot even read.

A list of known places, so not complete: a key elsewhere (a `.env` in a project) can be read.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_HOME = """
.ssh .gnupg .pki .aws .azure .kube .docker .oci .config/gcloud .config/gh .config/hub .config/glab-cli
.config/op .config/rclone .config/sops .config/git/credentials .git-credentials .netrc .authinfo .authinfo.gpg
.pypirc .npmrc .yarnrc.yml .cargo/credentials .cargo/credentials.toml .gem/credentials .m2/settings.xml
.terraform.d .terraformrc .vault-token .pgpass .my.cnf .huggingface .cache/huggingface/token
.cache/huggingface/stored_tokens .kaggle
.local/share/keyrings .local/share/kwalletd .password-store .config/keepassxc
.mozilla .thunderbird .config/google-chrome .config/chromium .config/BraveSoftware .config/microsoft-edge
.bash_history .zsh_history .python_history .psql_history .mysql_history .local/share/fish
Library/Keychains Library/Cookies Library/Safari Library/Mail Library/Messages
"""
_HOME_SPACED = ("Library/Application Support/Google/Chrome", "Library/Application Support/Firefox")
_SYSTEM = ["/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/sudoers.d", "/etc/krb5.keytab"]

# What a program on macOS asks for keys, and what it could start other programs with.
MAC_SERVICES = (
    "com.apple.SecurityServer",
    "com.apple.securityd",
    "com.apple.securityd.xpc",
    "com.apple.secd",
    "com.apple.coreservices.launchservicesd",
    "com.apple.pasteboard.1",
)


def secret_paths(home: Path | None = None) -> list[Path]:
    """The known places that exist, links followed. `home` defaults to HOME and to the account's own."""
    homes = [home] if home else _homes()
    places = [root / name for root in homes for name in (*_HOME.split(), *_HOME_SPACED)]
    # Not Path.exists: that raises where a folder may not be entered, as in another account's home.
    found = [
        Path(os.path.realpath(place)) for place in (*places, *map(Path, _SYSTEM)) if os.path.exists(place)
    ]
    return list(dict.fromkeys(found))


def _homes() -> list[Path]:
    homes = [Path.home()] if os.environ.get("HOME") else []
    if os.name == "posix":
        import pwd

        with contextlib.suppress(KeyError):  # a user id without an account, as in many containers
            homes.append(Path(pwd.getpwuid(os.getuid()).pw_dir))
    return [home for home in dict.fromkeys(homes) if home.is_absolute()]
