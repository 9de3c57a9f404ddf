"""The decode loop and its parts: requests, next-token distributions, span scores, speculation and results."""
