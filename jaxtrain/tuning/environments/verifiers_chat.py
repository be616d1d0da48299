"""A harness of verifiers for conversations without tools, in the worker's own process.

verifiers' own harnesses start a program for each turn, whose packages it installs at first; a TOML file may ask for
them. Imported where verifiers is installed.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

ID = "jaxtrain-chat"


def register() -> None:
    """Have verifiers find the harness by its id, which it takes for the name of a package."""
    import openai
    from verifiers.v1 import Harness, HarnessConfig, ProgramResult

    class ChatConfig(HarnessConfig):
        """The options of the harness: those of any."""

    class Chat(Harness[ChatConfig]):
        """Asks the model once for each turn."""

        APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [one.model_dump(exclude_none=True) for one in prompt or ()]
            async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            return ProgramResult(exit_code=0, stdout="", stderr="")

    module = ModuleType(ID.replace("-", "_"))
    vars(module).update(Chat=Chat, __all__=["Chat"])
    module.__spec__ = ModuleSpec(module.__name__, None)
    sys.modules[module.__name__] = module
