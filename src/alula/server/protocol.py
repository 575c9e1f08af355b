"""Bodies of requests, as OpenAI's API and vLLM's extensions name them. Unknown fields are refused.

Values are not coerced: a number in quotes is an error. None stands for a field that is left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId: TypeAlias = Annotated[int, Field(ge=0)]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.\-]+$")]


DEEPEST_BODY = 256
"""Objects and lists within each other; far from where Python's stack ends."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class WholeBody(Body):
    @model_validator(mode="before")
    @classmethod
    def _check_depth(cls, value: Any) -> Any:
        """Schemas and template variables are walked recursively later on."""
        if is_deep(value):
            raise PydanticCustomError("too_deep", f"it nests more than {DEEPEST_BODY} deep, so flatten it")
        return value


def is_deep(value: Any) -> bool:
    """Whether lists and objects of a JSON value nest more than DEEPEST_BODY deep."""
    level = [value]
    for _ in range(DEEPEST_BODY + 1):
        within = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list))]
        if not within:
            return False
        level = [child for children in within for child in children if isinstance(child, (dict, list))]
    return True


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SpeculationOptions(Body):
    """How this request is drafted for. The text does not depend on it (rule `coupled`)."""

    off: bool = False
    nodes: Annotated[int, Field(ge=1)] | None = None
    depth: Annotated[int, Field(ge=0, le=32)] | None = None
    drafter: str | None = None
    floor: Annotated[float, Field(ge=0, lt=1)] | None = None
    trace: bool = False
    """Choices carry `speculation`: which step committed which token, and the tree of every step."""


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    """strict: the schema is always kept to, so nothing depends on it."""

    name: Name
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat: TypeAlias = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """Exactly one of json, regex, choice, grammar and json_object."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    free_until: str | None = None
    """Tokens are free up to and with this marker, such as `</think>`."""


class GenerationBody(WholeBody):
    """What completions and chat have in common."""

    model: str | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    user: str | None = None

    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: Annotated[list[Text], Field(max_length=256)] | None = None
    logits_processors: Annotated[list[str], Field(max_length=16)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: Name | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    free_until: Text | None = None
    """Goes with a `response_format`: tokens are free up to and with this marker, such as `</think>`."""

    speculation: SpeculationOptions | None = None
    stream_single_tokens: bool | None = None
    """One token per chunk, in place of one step's."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which the request ends with what it has."""


Prompt: TypeAlias = (
    str
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
)


class CompletionBody(GenerationBody):
    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(WholeBody):
    """A prompt, or messages, never both."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(WholeBody):
    model: str | None = None
    tokens: list[TokenId]
