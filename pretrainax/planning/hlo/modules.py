"""Finds the module of the model that computes a value of a compiled program."""

import os
import re

from pretrainax.planning.hlo.instructions import Instruction
from pretrainax.planning.hlo.program import Program

# Opcodes whose result has the elements of an operand, but elsewhere in memory, or in another layout or dtype.
_TRANSPARENT = ("bitcast", "copy", "convert", "reshape", "transpose", "get-tuple-element", "copy-done")
# Components of an op_name (JAX's name stack) that come from JAX transformations, not from the model.
_PATH_NOISE = re.compile(
    r".*[^a-z0-9_].*|while|body|cond|closed_call|checkpoint|remat\d*|rematted_computation|custom_[jv]\w+_call\w*"
    r"|branch_\d+_fun|shard_map|pjit|core_call|scan|vmap|pallas_call"
)


def module_of(op_name: str) -> str:
    """Parses the module path from an instruction's op_name; returns "" for an instruction outside the model.

    For example, `jit(step)/transpose(jvp(T))/encoder/while/body/closed_call/blocks/mlp/up/dot_general` becomes
    encoder/blocks/mlp/up. For an argument of the step, the result is the argument's path:
    `state.params['encoder']['blocks']` becomes state/params/encoder/blocks.
    """
    if op_name.startswith(("state.", "batch[")):
        return "/".join(re.findall(r"\w+", op_name))
    components = (
        re.sub(r"^(?:transpose\(|jvp\(|vmap\()+([^()]*)\)+$", r"\1", component) for component in op_name.split("/")[:-1]
    )
    return "/".join(component for component in components if component and not _PATH_NOISE.fullmatch(component))


class Modules:
    """The module path of each value of a program, computed on demand and cached."""

    def __init__(self, program: Program):
        self._program = program
        self._paths: dict[tuple[str, str, int], str] = {}

    def module_path(self, computation: str, name: str, index: int = 0) -> str:
        """Returns the path of the module that computes a value.

        If the value is an in-place update of a larger array, this is the module that computes the new elements.

        Args:
          computation: name of the computation.
          name: name of the instruction.
          index: index of the array in the result of the instruction.
        """
        key = computation, name, index
        if key not in self._paths:
            self._paths[key] = self._find_module(*key)
        return self._paths[key]

    def _find_module(self, computation: str, name: str, index: int) -> str:
        """Finds a value's module path, uncached, by tracing it back through fusions, parameters and layout changes."""
        instructions = self._program.computations[computation]
        instruction = instructions[name]
        if instruction.opcode == "fusion":
            fused_computation = instruction.attribute("calls")
            return (
                self.module_path(fused_computation, self._program.result_instructions(fused_computation)[index])
                or module_of(instruction.op_name)
                or self.in_common(computation, instruction)
            )
        if instruction.opcode == "parameter" and (call := self._program.callers.get(computation)):
            caller, fusion = call
            return self.module_path(caller, fusion.operands[int(instruction.operands[0])])
        is_update, own_module = instruction.opcode == "dynamic-update-slice", module_of(instruction.op_name)
        if is_update or instruction.opcode in _TRANSPARENT:
            operand = instruction.operands[1 if is_update else 0]
            operand_index = int(instruction.attribute("index") or 0) if instruction.opcode == "get-tuple-element" else 0
            operand_module = self.module_path(computation, operand, operand_index) if operand in instructions else ""
            return operand_module if operand_module.startswith(own_module) else own_module
        return own_module or self.in_common(computation, instruction)

    def in_common(self, computation: str, made: Instruction) -> str:
        """Returns the common prefix of the module paths of an instruction's operands.

        If there is no common prefix, returns the module path of the first operand that has one. This method handles
        instructions without an op_name: combined collectives, and instructions that the compiler adds.
        """
        module_paths = (
            self.module_path(computation, x) for x in made.operands if x in self._program.computations[computation]
        )
        paths = [module.split("/") for module in module_paths if module]
        return "/".join(os.path.commonprefix(paths) or next(iter(paths), []))
