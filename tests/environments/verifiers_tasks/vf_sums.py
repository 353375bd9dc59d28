"""Tasksets of verifiers for tests: sums asked once (`vf_sums`). The others build on it."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str
    difficulty: int = 1


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply.split())

    @vf.metric
    async def words(self, trace) -> float:
        return float(len(trace.last_reply.split()))


class SumsConfig(vf.TasksetConfig):
    count: int = 10


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for number in range(self.config.count):
            prompt = f"What is {number} + {number + 1}? Answer with the number."
            data = {"answer": str(2 * number + 1), "difficulty": 1 + number % 3}
            yield Sum(SumData(prompt=prompt, system_prompt="You add.", **data), self.config.task)
