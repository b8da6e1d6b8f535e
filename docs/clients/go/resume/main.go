// A stream that survives its connection and its gateway, with the module of clients/go.
//
// RYZANSTEIN_URL may name several gateways, separated by commas: when one is lost the next one goes on.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strings"

	ryzanstein "ryzanstein-client"
)

func env(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

func main() {
	log.SetFlags(0)
	ctx := context.Background()
	client, err := ryzanstein.New(strings.Split(env("RYZANSTEIN_URL", "http://127.0.0.1:8000"), ",")...)
	if err != nil {
		log.Fatal(err)
	}
	client.APIKey = env("RYZANSTEIN_API_KEY", "none")
	models, err := client.Models(ctx)
	if err != nil || len(models) == 0 {
		log.Fatal("no model is served ", err)
	}
	stream := client.StreamChat(ctx, map[string]any{
		"model":      models[0],
		"messages":   []any{map[string]string{"role": "user", "content": "Tell me a story."}},
		"max_tokens": 200,
	}, ryzanstein.Options{})
	for stream.Next() {
		fmt.Print(stream.Piece().Text)
	}
	if err := stream.Err(); err != nil {
		log.Fatal(err)
	}
	fmt.Println()
}
