"""Guessing a number in several turns: the environment answers each guess."""

import verifiers.v1 as vf

__all__ = ["Guess", "GuessEnv"]


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class Guess(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for number in range(1, 11):
            yield GuessTask(GuessData(prompt="Guess a number from 1 to 10.", number=number), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            for turn in range(5):
                said = segment.last_reply.strip()
                if said == str(task.data.number):
                    talk.trace.record_reward("guessed", 1.0 - 0.1 * turn, 1.0)
                    break
                if said == "crash":
                    raise RuntimeError("the environment broke")
                hint = "higher" if said.isdigit() and int(said) < task.data.number else "lower"
                segment = await talk.turn(hint)
