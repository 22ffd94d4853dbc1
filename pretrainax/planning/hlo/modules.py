"""Finds the module of the model that computes a value of a compiled program."""

import os
import re

from pretrainax.planning.hlo.instructions import Instruction
from pretrainax.planning.hlo.program import Program

# Opcodes whose result is their operand at a different position, or in a different layout or dtype.
_TRANSPARENT = ("bitcast", "copy", "convert", "reshape", "transpose", "get-tuple-element", "copy-done")
# Parts of an op_name (JAX's name stack) that come from JAX transformations, not from the model.
_PATH_NOISE = re.compile(
    r".*[^a-z0-9_].*|while|body|cond|closed_call|checkpoint|remat\d*|rematted_computation|custom_[jv]\w+_call\w*"
    r"|branch_\d+_fun|shard_map|pjit|core_call|scan|vmap|pallas_call"
)


def module_of(op_name: str) -> str:
    """Returns the module path of an instruction, from its op_name; "" for an instruction outside the model.

    `jit(step)/transpose(jvp(T))/encoder/while/body/closed_call/blocks/mlp/up/dot_general` -> encoder/blocks/mlp/up. For
    an argument of the step, the result is its path: `state.params['encoder']['blocks']` -> state/params/encoder/blocks.
    """
    if op_name.startswith(("state.", "batch[")):
        return "/".join(re.findall(r"\w+", op_name))
    parts = (re.sub(r"^(?:transpose\(|jvp\(|vmap\()+([^()]*)\)+$", r"\1", part) for part in op_name.split("/")[:-1])
    return "/".join(part for part in parts if part and not _PATH_NOISE.fullmatch(part))


class Modules:
    """The module path of each value of a program, computed on demand and cached."""

    def __init__(self, program: Program):
        self._program = program
        self._found: dict[tuple[str, str, int], str] = {}

    def module_path(self, computation: str, name: str, index: int = 0) -> str:
        """Returns the path of the module that computes a value; for an update of a larger array, of the new elements.

        Args:
          computation: name of the computation.
          name: name of the instruction.
          index: index of the array in the result of the instruction.
        """
        key = computation, name, index
        if key not in self._found:
            self._found[key] = self._find_module(*key)
        return self._found[key]

    def _find_module(self, computation: str, name: str, index: int) -> str:
        instructions = self._program.computations[computation]
        instruction = instructions[name]
        if instruction.opcode == "fusion":
            inside = instruction.attribute("calls")
            return (
                self.module_path(inside, self._program.makers(inside)[index])
                or module_of(instruction.op_name)
                or self.in_common(computation, instruction)
            )
        if instruction.opcode == "parameter" and (call := self._program.callers.get(computation)):
            outer, fusion = call
            return self.module_path(outer, fusion.operands[int(instruction.operands[0])])
        is_update, own_module = instruction.opcode == "dynamic-update-slice", module_of(instruction.op_name)
        if is_update or instruction.opcode in _TRANSPARENT:
            part = instruction.operands[1 if is_update else 0]
            number = int(instruction.attribute("index") or 0) if instruction.opcode == "get-tuple-element" else 0
            operand_module = self.module_path(computation, part, number) if part in instructions else ""
            return operand_module if operand_module.startswith(own_module) else own_module
        return own_module or self.in_common(computation, instruction)

    def in_common(self, computation: str, made: Instruction) -> str:
        """Returns the common prefix of the module paths of an instruction's operands.

        Without a common prefix, the result is the module of the first operand that has one. This is for instructions
        without op_name: combined collectives, and instructions that the compiler adds.
        """
        modules = (
            self.module_path(computation, x) for x in made.operands if x in self._program.computations[computation]
        )
        paths = [module.split("/") for module in modules if module]
        return "/".join(os.path.commonprefix(paths) or next(iter(paths), []))
