module ryzanstein-examples

go 1.19

require ryzanstein-client v0.1.0

replace ryzanstein-client => ../../../clients/go
