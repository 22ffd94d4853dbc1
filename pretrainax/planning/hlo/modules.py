"""The module of the model that each result of a program belongs to."""

import os
import re

from pretrainax.planning.hlo.instructions import Instruction
from pretrainax.planning.hlo.program import Program

# Opcodes whose result is their operand in another place, layout or dtype.
_TRANSPARENT = ("bitcast", "copy", "convert", "reshape", "transpose", "get-tuple-element", "copy-done")
# Parts of an op_name that are how JAX came there, not where in the model.
_PATH_NOISE = re.compile(
    r".*[^a-z0-9_].*|while|body|cond|closed_call|checkpoint|remat\d*|rematted_computation|custom_[jv]\w+_call\w*"
    r"|branch_\d+_fun|shard_map|pjit|core_call|scan|vmap|pallas_call"
)


def module_of(op_name: str) -> str:
    """Returns the path in the model that an instruction was traced in; empty outside of the model.

    `jit(step)/transpose(jvp(T))/encoder/while/body/closed_call/blocks/mlp/up/dot_general` -> encoder/blocks/mlp/up. Of
    an argument of the step its path, `state.params['encoder']['blocks']` -> state/params/encoder/blocks.
    """
    if op_name.startswith(("state.", "batch[")):
        return "/".join(re.findall(r"\w+", op_name))
    parts = (re.sub(r"^(?:transpose\(|jvp\(|vmap\()+([^()]*)\)+$", r"\1", part) for part in op_name.split("/")[:-1])
    return "/".join(part for part in parts if part and not _PATH_NOISE.fullmatch(part))


class Modules:
    """The modules of a program's results, found as they are asked for."""

    def __init__(self, program: Program):
        self._program = program
        self._found: dict[tuple[str, str, int], str] = {}

    def of(self, computation: str, name: str, index: int = 0) -> str:
        """Finds the module that wrote a result; of one that is written into a larger array, whose part it is."""
        key = computation, name, index
        if key not in self._found:
            self._found[key] = self._find_module(*key)
        return self._found[key]

    def _find_module(self, computation: str, name: str, index: int) -> str:
        instructions = self._program.computations[computation]
        made = instructions[name]
        if made.opcode == "fusion":
            inside = made.attribute("calls")
            return (
                self.of(inside, self._program.makers(inside)[index])
                or module_of(made.op_name)
                or self.in_common(computation, made)
            )
        if made.opcode == "parameter" and (call := self._program.callers.get(computation)):
            outer, fusion = call
            return self.of(outer, fusion.operands[int(made.operands[0])])
        written, own = made.opcode == "dynamic-update-slice", module_of(made.op_name)
        if written or made.opcode in _TRANSPARENT:
            part = made.operands[1 if written else 0]
            number = int(made.attribute("index") or 0) if made.opcode == "get-tuple-element" else 0
            found = self.of(computation, part, number) if part in instructions else ""
            return found if found.startswith(own) else own
        return own or self.in_common(computation, made)

    def in_common(self, computation: str, made: Instruction) -> str:
        """Returns what the modules of all operands begin with, else the first of them.

        The compiler joins collectives that it can run as one, and gives some of what it adds no name.
        """
        modules = (self.of(computation, x) for x in made.operands if x in self._program.computations[computation])
        paths = [module.split("/") for module in modules if module]
        return "/".join(os.path.commonprefix(paths) or next(iter(paths), []))
