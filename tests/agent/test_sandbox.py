"""The sandbox's arguments and refusals; that it really holds is in test_hostile_tools.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from posttrainllm.agent import sandbox as module
from posttrainllm.agent.executor import CommandBackend
from posttrainllm.agent.sandbox import Sandbox, bwrap_arguments, choose_sandbox, seatbelt_arguments
from posttrainllm.agent.secrets import secret_paths
from posttrainllm.agent.tools import Tool
from posttrainllm.runtime.errors import UsageError

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap is Linux's")


@pytest.fixture
def works() -> None:
    try:
        choose_sandbox("auto")
    except UsageError as error:
        pytest.skip(str(error))


def fake(tmp_path: Path, text: str) -> str:
    program = tmp_path / "bwrap"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


def test_off_is_off_and_unknown_names_are_refused() -> None:
    assert choose_sandbox("off") is None
    with pytest.raises(UsageError, match="off, auto, bwrap, seatbelt"):
        choose_sandbox("chroot")


def test_permissions_without_a_sandbox_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--allow-write"):
        choose_sandbox("off", writable=[tmp_path])
    with pytest.raises(UsageError, match="--allow-net"):
        choose_sandbox("off", network=True)


@pytest.mark.parametrize("name", ["bwrap", "seatbelt"])
def test_the_sandbox_of_another_system_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UsageError, match="does not exist on win32") as caught:
        choose_sandbox(name)
    assert caught.value.exit_code == 2


def test_auto_without_any_is_a_refusal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UsageError, match="there is none for win32"):
        choose_sandbox("auto")


@linux_only
@pytest.mark.parametrize("name", ["auto", "bwrap"])
def test_p78_missing_is_a_refusal_that_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_program", lambda program: None)
    with pytest.raises(UsageError, match=r"bwrap is not installed.*install the package bubblewrap"):
        choose_sandbox(name)


@linux_only
@pytest.mark.parametrize("text", ["echo no namespaces >&2; exit 1", "exit 0", "sleep 600"])
def test_p78_one_that_does_not_start_anything_is_a_refusal(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that succeeds without having run the probe: it would not run the tool either."""
    program = fake(tmp_path, text)
    monkeypatch.setattr(module, "find_program", lambda name: program)
    monkeypatch.setattr(module, "_PROBE_S", 1)
    with pytest.raises(UsageError, match="bwrap does not work here"):
        choose_sandbox("auto")


@linux_only
def test_a_program_of_that_name_on_path_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, 'shift $(($# - 1)); exec "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert module.find_program("bwrap") != str(tmp_path / "bwrap")


def test_a_folder_that_may_be_written_exists_and_holds_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh" / "sub").mkdir(parents=True)
    for folder, found in (
        (tmp_path / "absent", "no such folder"),
        (tmp_path / ".ssh" / "sub", "holds secrets"),
    ):
        with pytest.raises(UsageError, match=found):
            module._check_writable(folder)


def test_known_places_of_keys_are_found_through_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".ssh").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".netrc").write_text("x")
    browser = tmp_path / "Library" / "Application Support" / "Google" / "Chrome"
    browser.mkdir(parents=True)
    found = secret_paths(tmp_path)
    for path in (tmp_path / "elsewhere", tmp_path / ".netrc", browser):
        assert Path(os.path.realpath(path)) in found


def test_the_arguments_of_bwrap(tmp_path: Path) -> None:
    keys, token = tmp_path / "keys", tmp_path / "token"
    keys.mkdir()
    token.write_text("x")
    text = " ".join(bwrap_arguments([tmp_path], False, [keys, token], Path("/usr")))
    for words in (
        "--unshare-pid",
        "--unshare-net",
        "--die-with-parent",
        "--cap-drop ALL",
        "--ro-bind / /",
        "--tmpfs /tmp",
        f"--bind {tmp_path} {tmp_path}",
        "--chdir /usr",
    ):
        assert words in text
    assert text.index(f"--bind {tmp_path}") < text.index(f"--tmpfs {keys}"), "later ones hide earlier ones"
    assert f"--ro-bind {os.devnull} {token}" in text
    assert "--unshare-net" not in bwrap_arguments([], True, [], Path("/usr"))


def test_the_profile_of_seatbelt() -> None:
    odd = Path('/Users/me/a") (allow default)')
    profile, *parameters = seatbelt_arguments([odd], False, [Path("/Users/me/.ssh")])[1:]
    lines = profile.splitlines()
    assert lines[:3] == ["(version 1)", "(allow default)", "(deny file-write*)"]
    assert '(allow file-write* (subpath (param "WRITE0")))' in lines
    assert lines[-1] == '(deny file-read* file-write* (subpath (param "SECRET0")))', "the last rule counts"
    assert "(deny network*)" in lines
    assert "Users" not in profile, "a path is never part of the profile's text"
    assert parameters == ["-D", f"WRITE0={odd}", "-D", "SECRET0=/Users/me/.ssh"]
    assert "(deny network*)" not in seatbelt_arguments([], True, [])[1]


def test_the_start_line_says_what_is_allowed() -> None:
    text = Sandbox("bwrap", "/usr/bin/bwrap", (Path("/a"), Path("/b"))).describe()
    assert text == f"sandbox bwrap (writes: {Path('/a')}, {Path('/b')}; network: no)"
    assert Sandbox("bwrap", "x", (), True).describe() == "sandbox bwrap (writes: nowhere; network: yes)"


@pytest.mark.usefixtures("works")
def test_what_is_allowed_goes_through(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    sandbox = choose_sandbox("auto", writable=[tmp_path / "a b"], network=True)
    backend = CommandBackend(sandbox=sandbox, cwd=tmp_path)
    result = backend.call(Tool("t", exec="echo x >'a b/file'; echo x >file; pwd"), {})
    assert (tmp_path / "a b" / "file").read_text() == "x\n"
    assert not (tmp_path / "file").exists()
    assert result.stdout == f"{os.path.realpath(tmp_path)}\n"
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]} && echo connected"
        assert backend.call(Tool("t", exec=connect), {}).stdout == "connected\n"


@pytest.mark.usefixtures("works")
def test_a_sandboxed_tool_may_clean_up_after_sigterm() -> None:
    backend = CommandBackend(timeout_s=0.5, sandbox=choose_sandbox("auto"))
    result = backend.call(Tool("t", exec="trap 'echo bye; exit' TERM; while :; do sleep 0.05; done"), {})
    assert (result.stdout, result.timed_out) == ("bye\n", True)


@pytest.mark.usefixtures("works")
def test_a_sandbox_needs_no_shell_and_has_exit_codes() -> None:
    backend = CommandBackend(sandbox=choose_sandbox("auto"))
    assert backend.call(Tool("t", exec_argv=("printf", "%s", "{x}")), {"x": "a b"}).stdout == "a b"
    assert backend.call(Tool("t", exec="exit 7", sandbox=True), {}).exit_code == 7


@linux_only
@pytest.mark.usefixtures("works")
def test_root_in_the_sandbox_has_no_powers() -> None:
    backend = CommandBackend(sandbox=choose_sandbox("auto"))
    result = backend.call(
        Tool("t", exec="grep CapEff /proc/self/status; mount -o remount,rw / 2>&1; echo x >/x"), {}
    )
    assert "CapEff:\t0000000000000000" in result.stdout
    assert not Path("/x").exists()
