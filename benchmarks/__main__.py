from benchmarks.command import main

main()
