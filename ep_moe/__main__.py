from ep_moe_command import main

main()
