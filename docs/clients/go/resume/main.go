// A stream that survives its connection and its gateway; net/http alone.
//
// RYZANSTEIN_URL may name several gateways, separated by commas: when one is lost the next one goes on.
package main

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strings"
	"time"
)

const tries = 20 // in a row without anything new

var errRefused = errors.New("refused") // an answer, and none that another try would change

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

func open(method, url string, body []byte, headers map[string]string) (*http.Response, error) {
	request, err := http.NewRequest(method, url, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("%w: %v", errRefused, err)
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+env("RYZANSTEIN_API_KEY", "none"))
	for name, value := range headers {
		request.Header.Set(name, value)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil || answer.StatusCode == http.StatusOK {
		return answer, err
	}
	defer answer.Body.Close()
	text, _ := io.ReadAll(answer.Body)
	switch answer.StatusCode {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable:
		return nil, fmt.Errorf("%s: %s", answer.Status, text)
	}
	return nil, fmt.Errorf("%w: %s: %s", errRefused, answer.Status, text)
}

// read hands out whole events: one counts when the blank line behind it is there. It returns nil at [DONE].
func read(body io.Reader, event func(said chunk, id string)) error {
	lines := bufio.NewReader(body)
	var data, id string
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			return err
		}
		line = strings.TrimRight(line, "\r\n")
		switch {
		case strings.HasPrefix(line, "data: "):
			data = strings.TrimPrefix(line, "data: ")
		case strings.HasPrefix(line, "id: "):
			id = strings.TrimPrefix(line, "id: ")
		case line == "" && data == "[DONE]":
			return nil
		case line == "" && data != "":
			var said chunk
			if err := json.Unmarshal([]byte(data), &said); err != nil {
				return fmt.Errorf("%w: %v", errRefused, err)
			}
			if said.Error != nil {
				return errors.New(said.Error.Message) // of this gateway, or the end: the next try tells
			}
			event(said, id)
			data, id = "", ""
		}
	}
}

// stream prints the text. The same request under the same key is the same generation, at every gateway.
func stream(gateways []string, body []byte) error {
	key := make([]byte, 16)
	if _, err := rand.Read(key); err != nil {
		return err
	}
	headers := map[string]string{"Idempotency-Key": fmt.Sprintf("%x", key)}
	for turn, failed := 0, 0; ; turn++ {
		gateway := gateways[turn%len(gateways)]
		answer, err := open("POST", gateway+"/v1/chat/completions", body, headers)
		if err == nil {
			err = read(answer.Body, func(said chunk, id string) {
				headers["Last-Event-ID"] = id
				failed = 0
				for _, choice := range said.Choices {
					fmt.Print(choice.Delta.Content)
				}
			})
			answer.Body.Close()
		}
		if err == nil || errors.Is(err, errRefused) {
			return err
		}
		log.Printf("\n[%s is lost: %v]", gateway, err)
		if failed++; failed > tries {
			return errors.New("no gateway answers")
		}
		time.Sleep(time.Duration(failed) * 50 * time.Millisecond)
	}
}

func main() {
	log.SetFlags(0)
	gateways := strings.Split(env("RYZANSTEIN_URL", "http://127.0.0.1:8000"), ",")
	answer, err := open("GET", gateways[0]+"/v1/models", nil, nil)
	if err != nil {
		log.Fatal(err)
	}
	var models struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.NewDecoder(answer.Body).Decode(&models); err != nil || len(models.Data) == 0 {
		log.Fatal("no model is served ", err)
	}
	answer.Body.Close()
	body, err := json.Marshal(map[string]any{
		"model":      models.Data[0].ID,
		"messages":   []any{map[string]string{"role": "user", "content": "Tell me a story."}},
		"max_tokens": 200,
		"stream":     true,
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := stream(gateways, body); err != nil {
		log.Fatal(err)
	}
	fmt.Println()
}
