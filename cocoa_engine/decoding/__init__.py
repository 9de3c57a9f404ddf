"""The decode loop and what it consists of: requests, next-token distributions, span scores, results."""
