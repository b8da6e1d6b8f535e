module ryzanstein-client

go 1.19
