"""Sums with a tool that knows the numbers."""

import verifiers.v1 as vf
from vf_sums import Sum, SumData, SumsConfig

__all__ = ["Tools"]


class Numbers(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def number(self, name: str) -> str:
        """the number behind a name"""
        return str({"one": 1, "two": 2}[name])


class ToolSum(Sum):
    @classmethod
    def toolsets(cls, config):
        return [Numbers(vf.ToolsetConfig())]


class Tools(vf.Taskset[ToolSum, SumsConfig]):
    def load(self):
        for number in range(self.config.count):
            data = SumData(prompt=f"Look up one and two; what is their sum plus {number}?", answer=str(3 + number))
            yield ToolSum(data, self.config.task)


if __name__ == "__main__":
    Numbers.run()
