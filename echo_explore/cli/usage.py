"""What typer itself refuses, in our words: field, value, rule, fix."""

from collections.abc import Sequence

from typer.exceptions import TyperException

from echo_explore.core import SpecError, nearest


def translate(error: TyperException, arguments: Sequence[str]) -> SpecError:
    """The refusal of a command line as an error of ours.

    Args:
        error: unknown command or option, option that is missing or has no value, value of another type.
        arguments: of the command line, to show the value.
    """
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "echo-explore"
    parameter, option = getattr(error, "param", None), getattr(error, "option_name", "")
    names = list(parameter.opts) if parameter is not None else []
    help_text = f"see {command} --help"
    match type(error).__name__:
        case "MissingParameter":
            return SpecError(_shown(names), "(missing)", "must be given", f"add it, or {help_text}")
        case "BadParameter":
            rule = _plain(getattr(error, "message", "") or str(error))
            return SpecError(_shown(names), _value_of(names, arguments), rule, help_text)
        case "NoSuchOption":
            known = [name for p in context.command.params for name in p.opts] if context is not None else []
            hint = ", ".join(nearest(option, [name for name in known if name.startswith("--")]))
            fix = f"did you mean {hint}?" if hint else help_text
            return SpecError("option", option, f"is not an option of {command}", fix)
        case "BadOptionUsage":
            takes_none = "does not take" in error.format_message()
            rule = "takes no value" if takes_none else "needs a value"
            return SpecError(_shown([option]), _value_of([option], arguments) or "(missing)", rule, help_text)
        case "NoArgsIsHelpError":
            return SpecError("command", "(missing)", "must be given", f"use {_commands(context)}, or {help_text}")
        case _:
            known = list(getattr(context.command, "commands", {})) if context is not None else []
            if known:
                words = [word for word in arguments if not word.startswith("-")]
                unknown = "".join(words[len(command.split()) - 1 :][:1])
                hint = ", ".join(nearest(unknown, known))
                return SpecError("command", unknown, f"is not a command of {command}", f"did you mean {hint}?")
            return SpecError("arguments", " ".join(arguments), _plain(error.format_message()), help_text)


def _shown(names: Sequence[str]) -> str:
    """The long name of an option, or the name of an argument."""
    return max(names, key=len).removeprefix("--") if names else "arguments"


def _value_of(names: Sequence[str], arguments: Sequence[str]) -> str:
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            return value if equals else (arguments[position + 1] if position + 1 < len(arguments) else "")
    return "(given)"


def _plain(message: str) -> str:
    text = message.removeprefix("Input should be ").partition(", unable to parse")[0].rstrip(".")
    text = text.replace("a valid integer", "a whole number")
    return text[:1].lower() + text[1:] if text == message.rstrip(".") else f"must be {text}"


def _commands(context: object) -> str:
    return ", ".join(getattr(getattr(context, "command", None), "commands", {}))
