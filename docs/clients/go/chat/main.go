// A chat, streamed; net/http alone.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strings"
)

type chunk struct {
	Choices []struct {
		Delta struct {
			Content string `json:"content"`
		} `json:"delta"`
	} `json:"choices"`
	Error *struct {
		Message string `json:"message"`
	} `json:"error"`
}

func env(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

func ask(method, path string, body any) *http.Response {
	data, err := json.Marshal(body)
	if err != nil {
		log.Fatal(err)
	}
	request, err := http.NewRequest(method, env("RYZANSTEIN_URL", "http://127.0.0.1:8000")+path, bytes.NewReader(data))
	if err != nil {
		log.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+env("RYZANSTEIN_API_KEY", "none"))
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		log.Fatal(err)
	}
	if answer.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(answer.Body)
		log.Fatalf("%s: %s", answer.Status, text)
	}
	return answer
}

func main() {
	log.SetFlags(0)
	var models struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	answer := ask("GET", "/v1/models", nil)
	if err := json.NewDecoder(answer.Body).Decode(&models); err != nil || len(models.Data) == 0 {
		log.Fatal("no model is served ", err)
	}
	answer.Body.Close()

	answer = ask("POST", "/v1/chat/completions", map[string]any{
		"model":      models.Data[0].ID,
		"messages":   []any{map[string]string{"role": "user", "content": "Tell me a story."}},
		"max_tokens": 200,
		"stream":     true,
	})
	defer answer.Body.Close()
	lines := bufio.NewReader(answer.Body)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			log.Fatal("the stream ended early: ", err)
		}
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "data: ") {
			continue
		}
		data := strings.TrimPrefix(line, "data: ")
		if data == "[DONE]" {
			break
		}
		var said chunk
		if err := json.Unmarshal([]byte(data), &said); err != nil {
			log.Fatal(err)
		}
		if said.Error != nil {
			log.Fatal(said.Error.Message)
		}
		for _, choice := range said.Choices {
			fmt.Print(choice.Delta.Content)
		}
	}
	fmt.Println()
}
