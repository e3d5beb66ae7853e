"""``completion``: a script for bash, zsh or fish that completes commands, options and their values.

It is generated from the parser, so it knows everything that the parser knows. The script is static, because no TAB
should wait for Python to start, as with argcomplete; shtab, which makes static scripts, does not support fish.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable

from sidecar.cli.arguments import build_parser, list_commands
from sidecar.cli.result import Result
from sidecar.host.values import dataclass

FOLDERS = ("FOLDER",)
FILES = ("FILE",)
SANDBOX = "REF"
PROVIDERS = ("e2b:", "daytona:", "local:")


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command, as the scripts need it."""

    flags: tuple[str, ...]
    about: str
    takes: str
    """The placeholder for its value in the help; empty if it takes none."""
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """A command, as the scripts need it."""

    name: str
    about: str
    options: tuple[Option, ...]
    choices: tuple[str, ...]
    """The values of its first argument, if they are fixed."""
    files: bool
    """Whether it takes a file name."""


def run_completion(args: argparse.Namespace) -> Result:
    """Run ``completion``: print the script for a shell."""
    script = SCRIPTS[args.shell](build_commands())
    return Result({"shell": args.shell, "script": script}, [*script.rstrip("\n").split("\n")])


def build_commands() -> list[Command]:
    """Describe all commands of the parser."""
    root = build_parser()
    about = {row.dest: row.help or "" for action in root._actions for row in getattr(action, "_choices_actions", ())}
    return [_describe_command(name, about.get(name, ""), sub) for name, sub in list_commands(root).items()]


def _describe_command(name: str, about: str, sub: argparse.ArgumentParser) -> Command:
    named = [action for action in sub._actions if action.option_strings]
    words = [action for action in sub._actions if not action.option_strings]
    return Command(
        name,
        about,
        tuple(_describe_option(action) for action in named),
        tuple(choice for action in words[:1] for choice in action.choices or ()),
        any(action.metavar in FILES for action in words),
    )


def _describe_option(action: argparse.Action) -> Option:
    takes = "" if action.nargs == 0 else str(action.metavar or action.dest).upper()
    choices = PROVIDERS if takes == SANDBOX else tuple(map(str, action.choices or ()))
    return Option(tuple(action.option_strings), (action.help or "").replace("%%", "%"), takes, choices)


def render_bash(found: list[Command]) -> str:
    """Render the script for bash 3.2, which macOS has, and newer."""
    values = {flag: option for command in found for option in command.options for flag in option.flags if option.takes}
    names = _join_names(command.name for command in found)
    lines = [
        "# memory-sidecar: completion for bash",
        "_memory_sidecar() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" names="" i',
        # bash splits words at the colon of e2b:
        '    if [ "$before" = ":" ] || [ "$word" = ":" ]; then COMPREPLY=(); return; fi',
        '    for ((i = 1; i < COMP_CWORD; i++)); do [ "${COMP_WORDS[i]}" = "--" ] && { COMPREPLY=(); return; }; done',
        '    case "$before" in',
        *(f"        {flag}) {_render_bash_value(option)}; return ;;" for flag, option in sorted(values.items())),
        "    esac",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        COMPREPLY=($(compgen -W "{names} --help --version" -- "$word")); return',
        "    fi",
        '    case "${COMP_WORDS[1]}" in',
    ]
    for command in found:
        flags = _join_names([*_list_flags(command), *command.choices])
        files = '; [[ "$word" != -* ]] && COMPREPLY+=($(compgen -f -- "$word"))' if command.files else ""
        lines.append(f'        {command.name}) COMPREPLY=($(compgen -W "{flags}" -- "$word")){files} ;;')
    return "\n".join([*lines, "    esac", "}", "complete -o filenames -F _memory_sidecar memory-sidecar", ""])


def _render_bash_value(option: Option) -> str:
    if option.choices:
        return f'COMPREPLY=($(compgen -W "{_join_names(option.choices)}" -- "$word"))'
    if option.takes in FOLDERS:
        return 'COMPREPLY=($(compgen -d -- "$word"))'
    if option.takes in FILES:
        return 'COMPREPLY=($(compgen -f -- "$word"))'
    return "COMPREPLY=()"


def render_zsh(found: list[Command]) -> str:
    """Render the script for zsh."""
    lines = [
        "#compdef memory-sidecar",
        "_memory_sidecar() {",
        "    local -a commands",
        "    commands=(",
        *(f"        {shlex.quote(f'{command.name}:{_quote_zsh(command.about)}')}" for command in found),
        "    )",
        "    if ((CURRENT == 2)); then _describe command commands; return; fi",
        "    local command=$words[2]",
        "    shift words; ((CURRENT--))",
        "    case $command in",
    ]
    for command in found:
        specs = [_render_zsh_option(flag, option) for option in command.options for flag in option.flags]
        if command.choices:
            specs.append(f":word:({_join_names(command.choices)})")
        specs.append("*:file:_files" if command.files else "*:word:()")
        lines.append(f"        {command.name}) _arguments {' '.join(map(shlex.quote, specs))} ;;")
    # Found on the fpath, the script is the function's own body; read by eval, it has to be registered.
    called = 'if [ "$funcstack[1]" = "_memory_sidecar" ]; then _memory_sidecar "$@"'
    return "\n".join([*lines, "    esac", "}", called, "else compdef _memory_sidecar memory-sidecar; fi", ""])


def _render_zsh_option(flag: str, option: Option) -> str:
    spec = f"*{flag}[{_quote_zsh(option.about)}]"
    if not option.takes:
        return spec
    how = "_files" if option.takes in FILES else "_files -/" if option.takes in FOLDERS else ""
    # In zsh a colon separates a value from its description, so those in sandbox references are escaped.
    names = _join_names(choice.replace(":", "\\:") for choice in option.choices)
    return f"{spec}:{_quote_zsh(option.takes)}:{f'({names})' if names else how or '()'}"


def _quote_zsh(text: str) -> str:
    for character in "\\[]:":
        text = text.replace(character, f"\\{character}")
    return text.replace("`", "").replace("$", "")


def render_fish(found: list[Command]) -> str:
    """Render the script for fish."""
    all_names = _join_names(command.name for command in found)
    lines = [
        "# memory-sidecar: completion for fish",
        "complete -c memory-sidecar -f",
        f"set -l commands {all_names}",
    ]
    for command in found:
        start = 'complete -c memory-sidecar -n "not __fish_seen_subcommand_from $commands"'
        lines.append(f"{start} -a {command.name} -d {_quote_fish(command.about)}")
        within = f'complete -c memory-sidecar -n "__fish_seen_subcommand_from {command.name}"'
        if command.choices:
            lines.append(f"{within} -a {_quote_fish(_join_names(command.choices))}")
        if command.files:
            lines.append(f"{within} -F")
        lines += [f"{within} {_render_fish_option(option)}" for option in command.options]
    return "\n".join([*lines, ""])


def _render_fish_option(option: Option) -> str:
    flags = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags]
    value = "" if not option.takes else " -r"
    if option.choices:
        value += f" -a {_quote_fish(_join_names(option.choices))}"
    elif option.takes in (*FILES, *FOLDERS):
        value += " -F"
    return f"{' '.join(flags)}{value} -d {_quote_fish(option.about)}"


def _quote_fish(text: str) -> str:
    """Quote a text for fish: within single quotes only these two characters are escaped."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _list_flags(command: Command) -> list[str]:
    return [flag for option in command.options for flag in option.flags]


def _join_names(names: Iterable[str]) -> str:
    return " ".join(names)


SCRIPTS = {"bash": render_bash, "zsh": render_zsh, "fish": render_fish}
