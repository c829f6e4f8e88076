"""Programs of the system that tests use."""

import shutil
import subprocess


def missing_programs() -> str:
    """What a machine without a browser has to install; empty if it has one."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if not missing:
        return ""
    return f"{' and '.join(missing)} not found; apt-get install chromium chromium-driver"


def without_network(*command: str) -> list[str]:
    """The command in a network namespace of its own, where the system allows it."""
    unshare = ["unshare", "--map-root-user", "--net"]
    if (
        shutil.which("unshare")
        and subprocess.run([*unshare, "true"], capture_output=True).returncode == 0
    ):
        return [*unshare, *command]
    return list(command)
