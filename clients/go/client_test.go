package ryzanstein

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

const text = "A cursor – ok."

var chat = map[string]any{"model": "m", "messages": []any{map[string]string{"role": "user", "content": "Hi"}}}

type seen struct {
	method, path, body string
	header             http.Header
}

// served is a server that answers as the test says, and what it was asked.
type served struct {
	*httptest.Server
	lock  sync.Mutex
	asked []seen
}

func (s *served) requests() []seen {
	s.lock.Lock()
	defer s.lock.Unlock()
	return append([]seen(nil), s.asked...)
}

func serve(t *testing.T, answer func(w http.ResponseWriter, r *http.Request, number int)) *served {
	t.Helper()
	server := &served{}
	server.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		server.lock.Lock()
		server.asked = append(server.asked, seen{r.Method, r.URL.Path, string(body), r.Header})
		number := len(server.asked)
		server.lock.Unlock()
		answer(w, r, number)
	}))
	t.Cleanup(server.Close)
	return server
}

func connect(t *testing.T, gateways ...string) *Client {
	t.Helper()
	client, err := New(gateways...)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// events are those behind the request's Last-Event-ID, one for each character, and the end.
func events(r *http.Request) string {
	after, _ := strconv.Atoi(r.Header.Get("Last-Event-ID"))
	runes := []rune(text)
	var found strings.Builder
	found.WriteString(": waiting\n\n")
	for position := after + 1; position <= len(runes)+1; position++ {
		choice := map[string]any{"index": 0, "finish_reason": "stop"}
		if position <= len(runes) {
			choice = map[string]any{"delta": map[string]any{"content": string(runes[position-1])}}
		}
		data, _ := json.Marshal(map[string]any{"id": "chatcmpl-1", "choices": []any{choice}})
		fmt.Fprintf(&found, "data: %s\nid: %d\n\n", data, position)
	}
	return found.String() + "data: [DONE]\n\n"
}

func TestWhereverAConnectionIsCut(t *testing.T) {
	whole := events(httptest.NewRequest("GET", "/", nil))
	for cut := 0; cut < len(whole); cut += 83 {
		server := serve(t, func(w http.ResponseWriter, r *http.Request, number int) {
			if number > 1 {
				io.WriteString(w, events(r))
				return
			}
			io.WriteString(w, whole[:cut])
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		})
		stream := connect(t, server.URL).StreamChat(context.Background(), chat, Options{})
		read, position := "", 0
		for stream.Next() {
			position++
			read += stream.Piece().Text
			if stream.Piece().Position != strconv.Itoa(position) {
				t.Fatalf("cut at %d: %v instead of %d", cut, stream.Piece(), position)
			}
		}
		if stream.Err() != nil || read != text || stream.Piece().FinishReason != "stop" {
			t.Fatalf("cut at %d: %q, %v", cut, read, stream.Err())
		}
		asked := server.requests()
		if len(asked) != 2 || !strings.Contains(asked[0].body, `"stream":true`) {
			t.Fatalf("%v", asked)
		}
		again := asked[1].method == "POST" && asked[1].body == asked[0].body &&
			asked[1].header.Get("Idempotency-Key") == asked[0].header.Get("Idempotency-Key")
		if !again && asked[1].path != "/v1/generations/chatcmpl-1/stream" {
			t.Fatalf("%v", asked)
		}
	}
}

func TestAnotherGatewayGoesOn(t *testing.T) {
	server := serve(t, func(w http.ResponseWriter, r *http.Request, number int) {
		switch number {
		case 1:
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(503)
			io.WriteString(w, `{"error": {"message": "Stopping.", "code": "unavailable", "param": null}}`)
		case 2:
			w.WriteHeader(502)
		case 3:
			io.WriteString(w, `data: {"error": {"message": "Stopping.", "code": "unavailable"}}`+"\n\n")
		default:
			io.WriteString(w, events(r))
		}
	})
	client := connect(t, "http://127.0.0.1:9", server.URL+"/v1/")
	client.APIKey = "secret"
	stream := client.StreamChat(context.Background(), chat, Options{IdempotencyKey: "mine", Background: 1500 * time.Millisecond})
	if read, err := stream.Text(); read != text || err != nil {
		t.Fatalf("%q, %v", read, err)
	}
	asked := server.requests()
	first := asked[0].header
	if len(asked) != 4 || first.Get("Idempotency-Key") != "mine" || first.Get("X-Ryzanstein-Background") != "1.5" ||
		first.Get("Authorization") != "Bearer secret" {
		t.Fatalf("%v", asked)
	}
	rest, err := client.Attach(context.Background(), Cursor{"chatcmpl-1", "9"}).Text()
	if rest != string([]rune(text)[9:]) || err != nil {
		t.Fatalf("%q, %v", rest, err)
	}
}

func TestARefusalIsToldAtOnce(t *testing.T) {
	server := serve(t, func(w http.ResponseWriter, r *http.Request, number int) {
		w.Header().Set("X-Request-Id", "r-1")
		w.WriteHeader(404)
		io.WriteString(w, `{"error": {"message": "No.", "type": "t", "param": "model", "code": "model_not_found"}}`)
	})
	client := connect(t, server.URL)
	_, err := client.StreamChat(context.Background(), chat, Options{}).Text()
	var refusal *Error
	want := Error{Message: "No.", Type: "t", Code: "model_not_found", Param: "model", Status: 404, RequestID: "r-1"}
	if !errors.As(err, &refusal) || *refusal != want || err.Error() != "No. (404 model_not_found)" {
		t.Fatal(err)
	}
	if _, err := client.Models(context.Background()); !errors.As(err, &refusal) {
		t.Fatal(err)
	}
	if err := client.Chat(context.Background(), make(chan int), nil, Options{}); err == nil {
		t.Fatal("a channel is no body")
	}
	for body, options := range map[any]Options{1: {}, struct{}{}: {IdempotencyKey: "a\nb"}} {
		if stream := client.StreamChat(context.Background(), body, options); stream.Next() || stream.Err() == nil {
			t.Fatal(body, options)
		}
	}
	if len(server.requests()) != 2 {
		t.Fatal(server.requests())
	}
}

func TestWhatWasCancelledIsNotTriedForEver(t *testing.T) {
	server := serve(t, func(w http.ResponseWriter, r *http.Request, number int) {
		switch {
		case strings.HasSuffix(r.URL.Path, "/stream"):
			w.WriteHeader(503)
		case r.Method == "GET":
			io.WriteString(w, `{"id": "chatcmpl-1", "status": "cancelled"}`)
		default:
			first, _, _ := strings.Cut(events(r), "id: 2")
			io.WriteString(w, first+"id: 2\n\n"+`data: {"error": {"message": "Gone.", "code": "unavailable"}}`+"\n\n")
		}
	})
	_, err := connect(t, server.URL).StreamChat(context.Background(), chat, Options{}).Text()
	var refusal *Error
	if !errors.As(err, &refusal) || refusal.Status != 503 || refusal.Again {
		t.Fatal(err)
	}
}

func TestWithNobodyTherePatienceEnds(t *testing.T) {
	client := connect(t, "http://127.0.0.1:9")
	client.Patience = 100 * time.Millisecond
	if _, err := client.StreamChat(context.Background(), chat, Options{}).Text(); !errors.Is(err, ErrLost) {
		t.Fatal(err)
	}
	if _, err := client.State(context.Background(), "x"); !errors.Is(err, ErrLost) {
		t.Fatal(err)
	}
	released := make(chan struct{})
	silent := serve(t, func(http.ResponseWriter, *http.Request, int) { <-released })
	defer close(released)
	hasty := connect(t, silent.URL)
	hasty.Timeout, hasty.Patience = 20*time.Millisecond, 100*time.Millisecond
	if _, err := hasty.StreamChat(context.Background(), chat, Options{}).Text(); !errors.Is(err, ErrLost) {
		t.Fatal(err)
	}
}

func TestAContextEndsAStream(t *testing.T) {
	left := make(chan struct{})
	server := serve(t, func(w http.ResponseWriter, r *http.Request, number int) {
		io.WriteString(w, events(r)[:120])
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		left <- struct{}{}
	})
	client := connect(t, server.URL)
	ctx, cancel := context.WithCancel(context.Background())
	stream := client.StreamChat(ctx, chat, Options{})
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	cancel()
	if stream.Next() || !errors.Is(stream.Err(), context.Canceled) {
		t.Fatal(stream.Err())
	}
	<-left
	stream = client.StreamChat(context.Background(), chat, Options{})
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	stream.Close()
	<-left
	if stream.Next() || stream.Err() != nil || stream.Cursor() != (Cursor{"chatcmpl-1", "1"}) {
		t.Fatal(stream.Err(), stream.Cursor())
	}
}

func TestCalls(t *testing.T) {
	server := serve(t, func(w http.ResponseWriter, r *http.Request, number int) {
		switch r.Method + r.URL.Path {
		case "GET/v1/models":
			io.WriteString(w, `{"data": [{"id": "a"}, {"id": "b"}]}`)
		case "DELETE/v1/generations/x":
			io.WriteString(w, `{"cancelled": true}`)
		case "POST/v1/rerank":
			io.WriteString(w, `{"results": [{"index": 1, "relevance_score": 0.5, "document": {"text": "b"}}]}`)
		default:
			if number == 1 {
				panic(http.ErrAbortHandler)
			}
			io.WriteString(w, `{"choices": [{"message": {"content": "Yes."}}]}`)
		}
	})
	client := connect(t, server.URL)
	var answer struct {
		Choices []struct{ Message struct{ Content string } }
	}
	if err := client.Chat(context.Background(), chat, &answer, Options{}); err != nil || answer.Choices[0].Message.Content != "Yes." {
		t.Fatal(answer, err)
	}
	asked := server.requests()
	if asked[0].header.Get("Idempotency-Key") == "" || asked[0].header.Get("Idempotency-Key") != asked[1].header.Get("Idempotency-Key") {
		t.Fatal(asked)
	}
	ranking, err := client.Rerank(context.Background(), map[string]any{"documents": []string{"a", "b"}}, Options{})
	if err != nil || ranking.Results[0] != (Ranked{1, 0.5, struct {
		Text string `json:"text"`
	}{"b"}}) {
		t.Fatal(ranking, err)
	}
	var wrong []int
	if err := client.Chat(context.Background(), chat, &wrong, Options{}); err == nil || errors.Is(err, ErrLost) {
		t.Fatal(err)
	}
	if names, err := client.Models(context.Background()); err != nil || strings.Join(names, ",") != "a,b" {
		t.Fatal(names, err)
	}
	if gone, err := client.Cancel(context.Background(), "x"); err != nil || !gone {
		t.Fatal(gone, err)
	}
}

func TestWhatIsNoGateway(t *testing.T) {
	for _, given := range [][]string{{}, {""}, {"127.0.0.1:8000"}, {"http://"}, {"http://a", "ftp://b"}} {
		if _, err := New(given...); err == nil || !strings.Contains(err.Error(), "http://HOST:8000") {
			t.Fatal(given, err)
		}
	}
}
