// Package ryzanstein has what OpenAI's clients lack for Ryzanstein: streams that survive their connection and their
// gateway, and answers that are generated once however often they are asked for. It needs the standard library alone.
package ryzanstein

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
)

const (
	firstWait = 50 * time.Millisecond
	// A generation that nobody reads is kept for 5 s, unless more was asked for: be back before.
	longestWait  = time.Second
	longestEvent = 64 << 20 // bytes
)

// Client speaks to one server with any number of gateways. Goroutines may share it; change its fields before.
type Client struct {
	APIKey string
	// Timeout is the silence after which a stream's connection counts as lost. 60 s.
	Timeout time.Duration
	// AnswerTimeout is the longest time for a whole answer. 10 min.
	AnswerTimeout time.Duration
	// Patience is the time since the first failure without anything new after which it gives up. 2 min.
	Patience time.Duration
	// HTTP has no timeout of its own: that would end streams.
	HTTP *http.Client

	gateways []string
	lock     sync.Mutex
	at       int
}

// Options of one request; the zero value will do.
type Options struct {
	// IdempotencyKey is yours, so that another process can repeat the request; else one is made up.
	IdempotencyKey string
	// Background is how long it goes on with no reader; else the server's grace of 5 s.
	Background time.Duration
}

// State is what has come of a generation.
type State struct {
	ID     string `json:"id"`
	Model  string `json:"model"`
	Status string `json:"status"` // queued, in_progress, completed, failed or cancelled
	// Position, with which Attach goes on behind Response.
	Position any             `json:"position"`
	Response json.RawMessage `json:"response"`
}

// Ranking has documents by how well they answer a query, the best first.
type Ranking struct {
	Model   string   `json:"model"`
	Results []Ranked `json:"results"`
	Usage   struct {
		TotalTokens int `json:"total_tokens"`
	} `json:"usage"`
}

// Ranked is a document of a ranking.
type Ranked struct {
	Index          int     `json:"index"` // in the request
	RelevanceScore float64 `json:"relevance_score"`
	Document       struct {
		Text string `json:"text"`
	} `json:"document"` // empty with return_documents false
}

// New makes a client of gateways of which any will do, each as http://HOST:8000.
func New(gateways ...string) (*Client, error) {
	client := &Client{
		Timeout: time.Minute, AnswerTimeout: 10 * time.Minute, Patience: 2 * time.Minute, HTTP: &http.Client{},
	}
	for _, gateway := range gateways {
		found := strings.TrimSuffix(strings.TrimRight(strings.TrimSpace(gateway), "/"), "/v1")
		parsed, err := url.Parse(found)
		if err != nil || parsed.Host == "" || parsed.Scheme != "http" && parsed.Scheme != "https" {
			return nil, fmt.Errorf("%q is no gateway: name it as http://HOST:8000", gateway)
		}
		client.gateways = append(client.gateways, found)
	}
	if len(client.gateways) == 0 {
		return nil, errors.New("name at least one gateway, as http://HOST:8000")
	}
	return client, nil
}

// Chat is a whole chat completion: body has the endpoint's fields, answer takes its JSON.
func (c *Client) Chat(ctx context.Context, body, answer any, options Options) error {
	return c.Call(ctx, "/v1/chat/completions", body, answer, options)
}

// Rerank ranks documents: body has the endpoint's fields model, query, documents, top_n, ...
func (c *Client) Rerank(ctx context.Context, body any, options Options) (Ranking, error) {
	var ranking Ranking
	err := c.Call(ctx, "/v1/rerank", body, &ranking, options)
	return ranking, err
}

// Call posts body to a path of the API that answers in JSON, and takes the answer.
func (c *Client) Call(ctx context.Context, path string, body, answer any, options Options) error {
	ask, err := begin(path, body, nil, options)
	if err != nil {
		return err
	}
	return c.json(ctx, ask, c.AnswerTimeout, answer)
}

// Models are the names of what is served.
func (c *Client) Models(ctx context.Context) ([]string, error) {
	var answer struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	err := c.json(ctx, request{method: "GET", path: "/v1/models"}, c.Timeout, &answer)
	names := make([]string, len(answer.Data))
	for index, model := range answer.Data {
		names[index] = model.ID
	}
	return names, err
}

// State is what has come of a generation so far.
func (c *Client) State(ctx context.Context, generation string) (State, error) {
	var state State
	err := c.json(ctx, request{method: "GET", path: pathOf(generation)}, c.Timeout, &state)
	return state, err
}

// Cancel ends a generation for everybody; false when it had ended already.
func (c *Client) Cancel(ctx context.Context, generation string) (bool, error) {
	var answer struct {
		Cancelled bool `json:"cancelled"`
	}
	err := c.json(ctx, request{method: "DELETE", path: pathOf(generation)}, c.Timeout, &answer)
	return answer.Cancelled, err
}

func pathOf(generation string) string { return "/v1/generations/" + url.PathEscape(generation) }

type request struct {
	method, path string
	headers      map[string]string
	body         []byte
}

// begin makes a request that may be repeated: it always has a key. It overrides fields of the body.
func begin(path string, body any, override map[string]any, options Options) (request, error) {
	data, err := json.Marshal(body)
	fields := map[string]any{}
	if err == nil && len(override) > 0 {
		decoder := json.NewDecoder(bytes.NewReader(data))
		decoder.UseNumber()
		if err = decoder.Decode(&fields); err == nil {
			for name, value := range override {
				fields[name] = value
			}
			data, err = json.Marshal(fields)
		}
	}
	key := options.IdempotencyKey
	if err == nil && key == "" {
		drawn := make([]byte, 16)
		_, err = rand.Read(drawn)
		key = hex.EncodeToString(drawn)
	}
	if err != nil {
		return request{}, fmt.Errorf("the body of a request is a JSON object: %w", err)
	}
	headers := map[string]string{"Idempotency-Key": key}
	if options.Background > 0 {
		headers["X-Ryzanstein-Background"] = strconv.FormatFloat(options.Background.Seconds(), 'f', -1, 64)
	}
	return request{"POST", path, headers, data}, nil
}

// json tries until the answer is there, at one gateway after the other.
func (c *Client) json(ctx context.Context, ask request, timeout time.Duration, answer any) error {
	for patience := (patience{}); ; {
		gateway := c.gateway()
		err := c.jsonAt(ctx, gateway, ask, timeout, answer)
		if err == nil {
			return nil
		}
		if err := c.retreat(ctx, err, gateway, &patience); err != nil {
			return err
		}
	}
}

// jsonAt is one try at one gateway.
func (c *Client) jsonAt(ctx context.Context, gateway string, ask request, timeout time.Duration, answer any) error {
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	response, err := c.open(within, gateway, ask)
	if err != nil {
		return orLost(ctx, err)
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	if err == nil && !json.Valid(content) {
		err = fmt.Errorf("%s answered %s without JSON", gateway, response.Status)
	}
	if err != nil {
		return orLost(ctx, err)
	}
	return json.Unmarshal(content, answer)
}

// open returns an answer that is a success.
func (c *Client) open(ctx context.Context, gateway string, ask request) (*http.Response, error) {
	sent, err := http.NewRequestWithContext(ctx, ask.method, gateway+ask.path, bytes.NewReader(ask.body))
	if err != nil {
		return nil, err
	}
	for name, value := range ask.headers {
		sent.Header.Set(name, value)
	}
	if ask.body != nil {
		sent.Header.Set("Content-Type", "application/json")
	}
	if c.APIKey != "" {
		sent.Header.Set("Authorization", "Bearer "+c.APIKey)
	}
	for name := range sent.Header { // else it would look like a lost connection
		if strings.IndexFunc(sent.Header.Get(name), unicode.IsControl) >= 0 {
			return nil, &Error{Message: "The header " + name + " has a control character.", Code: "invalid_header"}
		}
	}
	answer, err := c.HTTP.Do(sent)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode == http.StatusOK {
		return answer, nil
	}
	defer answer.Body.Close()
	content, err := io.ReadAll(io.LimitReader(answer.Body, 1<<20))
	if err != nil {
		return nil, err
	}
	return nil, refusal(answer, content)
}

// orLost says ErrLost of whatever is not the server's answer or the caller's end.
func orLost(ctx context.Context, err error) error {
	var refusal *Error
	switch {
	case err == nil || errors.As(err, &refusal) || errors.Is(err, ErrLost):
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return fmt.Errorf("%w: %v", ErrLost, err)
}

// --- where and when to try again ---

type patience struct {
	since time.Time // of the first failure; zero: there was none since something new came
	tries int
}

// waitAfter is how long to wait after a failure; false: it has lasted too long.
func (p *patience) waitAfter(err error, now time.Time, length time.Duration) (time.Duration, bool) {
	if p.since.IsZero() {
		p.since = now
	}
	wait := longestWait
	if p.tries < 5 {
		wait = firstWait << p.tries
	}
	p.tries++
	var refusal *Error
	if errors.As(err, &refusal) && refusal.RetryAfter > 0 {
		wait = refusal.RetryAfter
	}
	return wait, now.Add(wait).Sub(p.since) <= length
}

// retreat leaves the gateway and waits; it returns the error where another try would not help.
func (c *Client) retreat(ctx context.Context, err error, gateway string, patience *patience) error {
	if !worthAnotherTry(err) {
		return err
	}
	c.leave(gateway)
	wait, more := patience.waitAfter(err, time.Now(), c.Patience)
	if !more {
		return err
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *Client) gateway() string {
	c.lock.Lock()
	defer c.lock.Unlock()
	return c.gateways[c.at]
}

// leave goes on to the next gateway, if this is still the current one: others may have seen it first.
func (c *Client) leave(gateway string) {
	c.lock.Lock()
	defer c.lock.Unlock()
	if gateway == c.gateways[c.at] {
		c.at = (c.at + 1) % len(c.gateways)
	}
}
