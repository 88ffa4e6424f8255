"""Chats of rows: their messages, the text that a chat template makes of them, and its tokens."""
