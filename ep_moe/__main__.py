from ep_moe.cli import app

app()
