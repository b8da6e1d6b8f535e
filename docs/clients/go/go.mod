module ryzanstein-examples

go 1.19
