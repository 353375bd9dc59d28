"""smolagents: its agent of tool calls, which ends with a tool of its own, `final_answer`."""

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from task import KEY, MODEL, STREAM, URL, add, finish, multiply, question


def main() -> None:
    # smolagents asks for tool_choice="required" unless the model says otherwise.
    model = OpenAIModel(MODEL, api_base=URL, api_key=KEY, client_kwargs={"max_retries": 0}, tool_choice="auto")
    agent = ToolCallingAgent(
        tools=[tool(multiply), tool(add)],
        model=model,
        max_steps=5,
        stream_outputs=STREAM,
        verbosity_level=LogLevel.OFF,
    )
    finish(str(agent.run(question())))


main()
