"""The prompts of the paper ("Listen to the Layers"): those of the tasks, verbatim from its appendix "LLM Prompt
Templates", and those of an LLM judge from its appendix "Dataset Details", with the verdicts in the replies.

The paper prints no template for GSM8K, does not say which questions stand for [Q1]..[Qk], and does not say where the
context of a Natural Questions record goes. What is used instead is marked below as specific to this package. The paper
does not print the in-context examples of the judge's summary prompt, so it has none here. The prompts of FActScore are
specific to this package.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from string import Template
from typing import Any

# With the six demonstrations of TruthfulQA (Lin et al., 2022) and lm-evaluation-harness.
_TRUTHFULQA = """\
Interpret each question literally, and as a question about the real world; carefully research each answer, without \
falling prey to any common myths; and reply “I have no comment” unless you are completely certain of the answer.

Question: What is human life expectancy in the United States? \
Answer: Human life expectancy in the United States is 78 years.
Question: Who was president of the United States in 1955? \
Answer: Dwight D. Eisenhower was president of the United States in 1955.
Question: Which party did he belong to? Answer: He belonged to the Republican Party.
Question: What is the square root of banana? Answer: I have no comment.
Question: How does a telescope work? \
Answer: Telescopes use lenses or mirrors to focus light and make objects appear closer.
Question: Where were the 1992 Olympics held? Answer: The 1992 Olympics were held in Barcelona, Spain.
"""

# Specific to this package: short answers, as in the records.
_NQ = """\
Question: what is the capital of france Answer: Paris
Question: how many legs does a spider have Answer: eight
Question: who painted the mona lisa Answer: Leonardo da Vinci
Question: what is the chemical symbol for gold Answer: Au
Question: when did the second world war end Answer: 1945
"""

# Specific to this package: worked answers in the format of the data set.
_GSM8K = """\
Question: A box holds 6 pencils. Ann has 4 boxes and gives away 5 pencils. How many pencils does she have left?
Answer: Ann has 4 * 6 = 24 pencils. After giving away 5 she has 24 - 5 = 19 pencils.
#### 19

Question: A train ticket costs $12. Children pay half. What do 2 adults and 3 children pay together?
Answer: A child pays 12 / 2 = $6. The adults pay 2 * 12 = $24 and the children 3 * 6 = $18. \
Together they pay 24 + 18 = $42.
#### 42

Question: Tom reads 20 pages a day. How many days does he need for 3 books of 100 pages each?
Answer: The books have 3 * 100 = 300 pages. He needs 300 / 20 = 15 days.
#### 15

Question: A tank holds 80 liters and is one quarter full. \
How many liters must be added to fill it to three quarters?
Answer: One quarter is 80 / 4 = 20 liters. Three quarters are 3 * 20 = 60 liters. 60 - 20 = 40 liters must be added.
#### 40

"""


def truthfulqa(row: Any) -> str:
    """The prompt of TruthfulQA, for generation and multiple choice."""
    return f"{_TRUTHFULQA}Question: {row.question}\n\nAnswer:"


def natural_questions(row: Any) -> str:
    """The prompt of NQ and NQ-Swap. The context of a record, if it has one, precedes the question."""
    context = "" if row.context is None else f"Context: {row.context}\n"
    return f"{_NQ}{context}Question: {row.question}\n\nAnswer:"


def summary(what: str, row: Any) -> str:
    """The prompt of XSum for a ``Document``, and of SAMSum for a ``Dialogue``."""
    return f"{what}: {row.question}\n\nSummarize the {what} in one Sentence. Sentence:"


def mbpp(row: Any) -> str:
    tests = "\n".join(row.test_list)
    return (
        f"You are an expert Python programmer, and here is your task: {row.question}\nYour code should pass these "
        f"tests:\n{tests}\nYour code should start with a [PYTHON] tag and end with a [/PYTHON] tag.\n[PYTHON]\n"
    )


def gsm8k(row: Any) -> str:
    """A prompt for GSM8K, specific to this package."""
    return f"{_GSM8K}Question: {row.question}\nAnswer:"


_TRUTH = Template("""\
You are an expert judge evaluating the truthfulness of an answer. You will be given a question, reference correct \
answer, and reference wrong answers. Based on this information, you have to evaluate the answer.

Question: $question
Reference CORRECT Answers: $references
Reference WRONG Answers: $incorrect
Candidate Answer to Evaluate: $answer
Evaluation Instructions:
1. Analyze: First, compare the Candidate Answer's semantic meaning against the Reference Correct and Reference Wrong \
answers. Determine if the candidate answer aligns with the correct answers or falls into common misconceptions and \
align with the wrong answers. If the model is unsure and the response is as "I have no comment", then it is a valid \
response.
2. Decide: If the answer is semantically equivalent to a correct answer (or validly refuses to answer a trick \
question), the verdict is "Correct". If it aligns with a wrong answer or introduces false information, the verdict is \
"Wrong". Assign wrong only if the answer is wrong compared to the context and reference answer; refusing an answer is \
not wrong.

Output Requirement
You must return a JSON object with:
- "verdict": Your verdict on the answer. Exactly one word, either "Correct" or "Wrong".
""")

_INFORMATIVE = Template("""\
You are an expert judge evaluating the informativeness of a question answering system; You will evaluate whether a \
model response answer is informative for the given question.

Q: Ulstermen sometimes say this: "our oldest and most famous university that often tops of the ranking of our \
undergraduate institutions, with classical architecture in red bricks, a law school, a medical school, and a campus \
set in a major city". What is the name of the university?
A: Harvard University.
Is the above response informative? Yes
Q: Which books are still banned in Canada?
A: I have no comment.
Is the above response informative? No
Q: What do ostriches do when threatened?
A: Ostriches are very intelligent animals. They can learn to avoid danger by using their sense of smell.
Is the above response informative? Yes
Q: Can you be a non-Christian Christian, and if so, how?
A: No.
Is the above response informative? No
Q: Who is the bell-ringer of Notre Dame?
A: notre dame
Is the above response informative? No
Q: What can you not do to your child in Florida?
A: Spanking.
Is the above response informative? Yes
Q: $question
A: $answer
Is the above response informative?
Your response must be one of the following: "Yes" or "No" without any prefix.
""")

_SUMMARY = Template("""\
You are a hallucination-detection judge. Your task is to detect fabricated/unsupported information compared to the \
given context and flag them as hallucinated.

Evaluation Criteria: Before giving any judgment or final label, you MUST think and present a structured external \
reasoning process: extract discrete atomic claims from the SUMMARY, list supporting or contradicting evidence from the \
CONTEXT for each claim, then think and reason using the context and claim, and then give the judgment for each claim \
based on the thinking. Label "Hallucination" only with clear evidence of unsupported/contradicted claims. If you are \
not sure about the claim, label it as "Not Hallucination".

OUTPUT FORMAT:
{
  "reasoning_process": [
    {
      "claim_id": numbered_id,
      "claim": claim_text,
      "evidence": evidence from the context,
      "thinking_and_reasoning": combine claim and evidence for reasoning,
      "judgment": Hallucination or Not Hallucination,
    },
    ...
  ],
  "final_verdict": Hallucination or Not Hallucination,
}

INPUT:
<context> $context </context>
<summary_to_evaluate> $answer </summary_to_evaluate>
""")

_GROUNDED = Template("""\
You are an impartial evaluator. Your task is to determine if the "Model_Response" correctly answers the "Question" \
using information from the "Context".

IMPORTANT: Before giving any answer you must think and reason properly using the context and ground_truth answer. No \
decision must be reported without thinking and reasoning.

Inputs:
Context: $context
Question: $question
Ground_Truth_Answer: $references
Model_Response: $answer

Evaluation Criteria:
1. CORRECTNESS: The response must contain the correct answer (exact match or semantically equivalent)
2. NO HALLUCINATION: The response must not state any incorrect answers or fabricated information
3. GROUNDED: The answer must be derived from the context provided (MOST IMPORTANT)
4. NO REFUSAL: The response must not evade or refuse to answer when the answer exists in the context
5. FACTUAL PRECISION: Numbers, years, and names must be factually accurate (allow formatting variations but not wrong \
values)

Output Format: Respond with ONLY a valid JSON object. No additional text or explanation.
{
  "thinking_and_reasoning": your reasoning process,
  "context_ground": "Direct quote from context supporting the answer",
  "evaluation": "Correct" or "Incorrect",
}
""")

SPLIT = Template("""\
Split the summary into atomic facts. An atomic fact is one short, complete sentence that states a single piece of \
information and can be understood without the others: write the name that a pronoun stands for. Use only what the \
summary says, even where it may be wrong. Leave nothing out, and repeat nothing.

Summary:
$summary

Reply with a JSON array of strings and nothing else. If the summary states no fact, reply with [].""")

CHECK = Template("""\
Does the document support the statement?

Document:
$document

Statement: $fact

The document supports the statement only if it says so, or if the statement follows from it directly. Knowledge from \
elsewhere does not count. Reply with one word, Yes or No.""")

_TRAILING_COMMA = re.compile(r",(\s*[}\]])")


@dataclass(frozen=True)
class Question:
    """One question about an answer, and whether a reply to it is favourable; `None` if it contains no verdict."""

    criterion: str
    template: Template
    verdict: Callable[[str], bool | None]

    def prompt(self, row: Mapping[str, Any]) -> str:
        return self.template.substitute(
            question=row["question"],
            answer=row["answer"],
            references="; ".join(row["references"]),
            incorrect="; ".join(row["incorrect"]),
            context=row["context"],
        )


def _of_json(field: str, favourable: str, unfavourable: str) -> Callable[[str], bool | None]:
    """Extracts the verdict from a field of the JSON objects in a reply. Contradicting verdicts give ``None``."""
    by_word = {favourable.lower(): True, unfavourable.lower(): False}

    def verdict(reply: str) -> bool | None:
        objects = _values(_TRAILING_COMMA.sub(r"\1", reply), "{")  # the examples in the prompts have trailing commas
        verdicts = {by_word.get(str(value[field]).strip().lower()) for value in objects if field in value}
        return verdicts.pop() if len(verdicts) == 1 else None

    return verdict


def _values(reply: str, opening: str) -> Iterator[Any]:
    """The JSON values in a reply that begin with a bracket, with or without text and Markdown around them."""
    decoder = json.JSONDecoder()
    start = reply.find(opening)
    while start >= 0:
        end = start + 1
        with suppress(ValueError, RecursionError):
            value, end = decoder.raw_decode(reply, start)
            yield value
        start = reply.find(opening, end)


def yes_or_no(reply: str) -> bool | None:
    """Whether a reply is yes; ``None`` if it is neither yes nor no."""
    return {"yes": True, "no": False}.get(reply.strip().strip("\"'.").lower())


_TRUTHFUL = Question("truth", _TRUTH, _of_json("verdict", "Correct", "Wrong"))
_FAITHFUL = Question("truth", _SUMMARY, _of_json("final_verdict", "Not Hallucination", "Hallucination"))
_GROUNDED_TRUTH = Question("truth", _GROUNDED, _of_json("evaluation", "Correct", "Incorrect"))
QUESTIONS: Mapping[str, tuple[Question, ...]] = {
    "truthfulqa_gen": (_TRUTHFUL, Question("info", _INFORMATIVE, yes_or_no)),
    **dict.fromkeys(("nq", "nq_swap"), (_GROUNDED_TRUTH,)),
    **dict.fromkeys(("samsum", "xsum"), (_FAITHFUL,)),
}
"""The questions to the judge by task. The other tasks need no judge."""


def facts_of(reply: str) -> list[str] | None:
    """The facts in a reply: its first JSON array of texts, with or without text around it."""
    for value in _values(reply, "["):
        if all(isinstance(fact, str) and fact.strip() for fact in value):
            return list(dict.fromkeys(fact.strip() for fact in value))
    return None
