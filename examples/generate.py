"""Generate text: the shortest way to a model's tokens."""

import effinfer

llm = effinfer.LLM("smollm2-135m")
params = effinfer.SamplingParams(temperature=0.0, max_tokens=48)
for output in llm.generate(["The sea is", "A good engineer"], params):
    print(output.text, f"({output.finish_reason})")

for piece in llm.stream("Once upon a time", params):
    print(piece, end="", flush=True)
print()

print(llm.chat([{"role": "user", "content": "Name three colours."}], params).text)
