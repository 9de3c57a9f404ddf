"""One interface to a model, in this process or behind ``cocoa serve``: a call goes in, an answer comes out."""

from cocoa_integrations.chat_service.answer import Answer, ChatCall, Piece
from cocoa_integrations.chat_service.local import LocalChat
from cocoa_integrations.chat_service.remote import RemoteChat

__all__ = ["Answer", "ChatCall", "ChatService", "LocalChat", "Piece", "RemoteChat"]

ChatService = LocalChat | RemoteChat
"""A model that answers. Both have the same methods.

Errors of a model in this process are those of :class:`~cocoa_engine.CocoaEngine`. Errors of a server are those of the
package ``openai``.
"""
