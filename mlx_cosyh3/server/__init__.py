"""A server that speaks OpenAI's API: `mlx_cosyh3 serve`, or `server.app.create_app` in a program of one's own.

Needs the extra `server` (starlette, uvicorn); nothing of it is imported until it is used.
"""
