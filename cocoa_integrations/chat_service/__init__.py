"""One interface to a model, in this process or behind ``cocoa serve``: a call goes in, an answer comes out."""

from cocoa_integrations.chat_service.answer import Answer, AnswerStream, ChatCall, ChatService, Piece
from cocoa_integrations.chat_service.local import LocalChat
from cocoa_integrations.chat_service.remote import RemoteChat

__all__ = ["Answer", "AnswerStream", "ChatCall", "ChatService", "LocalChat", "Piece", "RemoteChat"]
