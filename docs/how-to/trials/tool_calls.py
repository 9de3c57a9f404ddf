"""Which thresholds let right tool calls pass: 22 requests, some of which leave arguments for the model to invent.

    python docs/how-to/trials/tool_calls.py

A call counts as right if every argument that the model wrote is the one that the request states.
"""

from __future__ import annotations

from typing import Any

from cocoa_integrations.langchain import ChatCocoa, argument_risks, get_risk

THRESHOLDS = {"self_information": (1.1, 2.5, 4.0), "risk": (0.2, 0.4), "f_mlds": (0.5, 0.95, 1.0)}


def book_table(restaurant: str, people: int, time: str) -> None:
    """Book a table at a restaurant."""


def get_weather(city: str, days: int) -> None:
    """Get the weather in a city."""


def send_email(to: str, subject: str) -> None:
    """Send an e-mail."""


def set_alarm(hour: int, minute: int, label: str) -> None:
    """Set an alarm."""


def convert_money(amount: float, source: str, target: str) -> None:
    """Convert money from one currency to another."""


REQUESTS: tuple[tuple[Any, str, dict[str, Any] | None], ...] = (
    (
        book_table,
        "Book a table for 4 people at Luigi's at 19:30.",
        {"restaurant": "Luigi's", "people": 4, "time": "19:30"},
    ),
    (
        book_table,
        "Book a table for 2 people at Chez Marie at 20:00.",
        {"restaurant": "Chez Marie", "people": 2, "time": "20:00"},
    ),
    (
        book_table,
        "Please reserve a table for 6 at the Golden Dragon at 18:15.",
        {"restaurant": "Golden Dragon", "people": 6, "time": "18:15"},
    ),
    (book_table, "Book me a table for dinner tonight.", None),
    (book_table, "I want to eat out.", None),
    (book_table, "Book a table at Luigi's.", None),
    (get_weather, "What is the weather in Lyon for 3 days?", {"city": "Lyon", "days": 3}),
    (get_weather, "Weather in Berlin for the next 5 days, please.", {"city": "Berlin", "days": 5}),
    (get_weather, "What is the weather in Oslo for 2 days?", {"city": "Oslo", "days": 2}),
    (get_weather, "What will the weather be like?", None),
    (get_weather, "Will it rain tomorrow?", None),
    (get_weather, "Is it warm there?", None),
    (
        send_email,
        "Send an e-mail to anna@example.com with the subject Lunch on Friday.",
        {"to": "anna@example.com", "subject": "Lunch on Friday"},
    ),
    (
        send_email,
        "Write to bob@work.org, subject: Quarterly report.",
        {"to": "bob@work.org", "subject": "Quarterly report"},
    ),
    (send_email, "Tell my brother that I am late.", None),
    (set_alarm, "Wake me at 6:45, label it Airport.", {"hour": 6, "minute": 45, "label": "Airport"}),
    (set_alarm, "Set an alarm for 22:10 called Medicine.", {"hour": 22, "minute": 10, "label": "Medicine"}),
    (set_alarm, "Set an alarm.", None),
    (set_alarm, "Wake me up early tomorrow.", None),
    (convert_money, "How much is 250 USD in EUR?", {"amount": 250, "source": "USD", "target": "EUR"}),
    (convert_money, "Convert 80 GBP to JPY.", {"amount": 80, "source": "GBP", "target": "JPY"}),
    (convert_money, "Change my money into euros.", None),
)


def main() -> None:
    """Make the calls and print, for each threshold, which ones a ToolRiskMiddleware would let pass and stop."""
    chat = ChatCocoa(max_tokens=64)
    default = 0.0
    calls: list[tuple[bool, dict[str, float]]] = []
    for tool, request, stated in REQUESTS:
        message = chat.bind_tools([tool], tool_choice="any").invoke(request)
        default = get_risk(message).threshold
        for call in message.tool_calls:
            arguments = argument_risks(message)[call["id"] or ""].values()
            highest = {
                "self_information": max(-one.log_prob for one in arguments),
                "risk": max(one.risk for one in arguments),
                "f_mlds": max(one.f_mlds for one in arguments),
            }
            calls.append((call["args"] == stated, highest))
            grade = "right" if call["args"] == stated else "wrong"
            print(f"{grade}  {highest['risk']:.2f}  {highest['self_information']:5.2f}  {call['args']}")
    for metric, thresholds in THRESHOLDS.items():
        for threshold in (*thresholds, default) if metric == "risk" else thresholds:
            passed = [values[metric] < threshold for right, values in calls if right]
            stopped = [values[metric] >= threshold for right, values in calls if not right]
            print(
                f"{metric:16} {threshold:5.3f}  right calls passed {sum(passed)}/{len(passed)}, "
                f"wrong calls stopped {sum(stopped)}/{len(stopped)}"
            )


if __name__ == "__main__":
    main()
