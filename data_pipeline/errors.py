"""Errors a user can act on, each with the exit code of the process that it ends.

Every message has three parts: the dotted path and value, the rule, the mend. Our own invariants use `assert` instead.
Codes follow sysexits.h, so that schedulers can tell "fix your input" from "try again".
"""


class UserError(ValueError):
    """Base class; `exit_code` is what a command returns to the shell."""

    exit_code = 70


class UsageError(UserError):
    """The command line itself can't be understood."""

    exit_code = 64


class DataError(UserError):
    """Input data is missing, malformed or not what the manifest promises."""

    exit_code = 65


class DivergedError(UserError):
    """Training produced non-finite numbers more often than allowed."""

    exit_code = 70


class StorageError(UserError):
    """Reading or writing files failed, or no usable checkpoint is left."""

    exit_code = 74


class TryAgainError(UserError):
    """Interrupted or preempted after saving: the same command goes on from there."""

    exit_code = 75


class ConfigError(UserError):
    """One or more config keys are wrong; `problems` holds one message each.

    Args:
        problems: messages, each with value, rule and mend.
    """

    exit_code = 78

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__(f"{head} in the config:\n" + "\n".join(f"  * {p}" for p in self.problems))
