from ep_moe.cli.app import app

app()
