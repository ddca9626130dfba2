# The openai package: lists models, completes, chats, streams.
environment openai openai
attempt openai "$CLIENTS/openai/bin/python" "$HERE/openai_client.py" "$URL"
tail -n 1 "$OUT/openai.log"
