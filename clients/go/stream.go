package ryzanstein

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// Cursor is where a reader stands in a generation. Whoever has it can go on, in any process.
type Cursor struct {
	Generation string `json:"generation"`
	// Position is the id of the last event that is here; empty: the stream comes from its beginning.
	Position string `json:"position"`
}

// Piece is one event of a stream.
type Piece struct {
	// Text is what it adds to the answer of its choice; empty where it says something else.
	Text         string
	Position     string
	Choice       int
	FinishReason string // stop, length, tool_calls, ... on the last piece of a choice
	Chunk        json.RawMessage
}

// Stream has the pieces of one generation, whatever connections and gateways are lost on the way:
//
//	for stream.Next() {
//		fmt.Print(stream.Piece().Text)
//	}
//	err := stream.Err()
//
// It is for one goroutine. Close it when you leave early.
type Stream struct {
	client     *Client
	ctx        context.Context
	begin      request
	cursor     Cursor
	piece      Piece
	done       bool
	err        error
	patience   patience
	connection *connection
}

// StreamChat begins a chat completion; body has the endpoint's fields.
func (c *Client) StreamChat(ctx context.Context, body any, options Options) *Stream {
	return c.stream(ctx, "/v1/chat/completions", body, options)
}

// StreamCompletion begins a completion of a prompt.
func (c *Client) StreamCompletion(ctx context.Context, body any, options Options) *Stream {
	return c.stream(ctx, "/v1/completions", body, options)
}

// Attach reads a chat completion or completion, running or ended, behind the cursor.
func (c *Client) Attach(ctx context.Context, cursor Cursor) *Stream {
	return &Stream{client: c, ctx: ctx, cursor: cursor}
}

func (c *Client) stream(ctx context.Context, path string, body any, options Options) *Stream {
	ask, err := begin(path, body, map[string]any{"stream": true}, options)
	return &Stream{client: c, ctx: ctx, begin: ask, err: err}
}

// Next reads the next piece; false at the end, and after an error.
func (s *Stream) Next() bool {
	for !s.done && s.err == nil {
		gateway := s.client.gateway()
		if s.connection != nil {
			gateway = s.connection.gateway
		}
		found, err := s.read(gateway)
		if err != nil {
			s.drop()
			s.err = s.client.retreat(s.ctx, orLost(s.ctx, err), gateway, &s.patience)
		} else if found {
			s.patience = patience{}
			return true
		}
	}
	s.drop()
	return false
}

// Piece is what Next has read.
func (s *Stream) Piece() Piece { return s.piece }

// Cursor stands behind the last piece; it has no generation before the first.
func (s *Stream) Cursor() Cursor { return s.cursor }

// Err is why the stream ended: nil at its end, an *Error, one that wraps ErrLost, or the context's.
func (s *Stream) Err() error { return s.err }

// Text is what is left of the first choice's text, to its end.
func (s *Stream) Text() (string, error) {
	var text strings.Builder
	for s.Next() {
		if s.piece.Choice == 0 {
			text.WriteString(s.piece.Text)
		}
	}
	return text.String(), s.err
}

// Close closes the connection. The generation ends some seconds later, unless somebody reads it.
func (s *Stream) Close() {
	s.done = true
	s.drop()
}

func (s *Stream) drop() {
	if s.connection != nil {
		s.connection.close()
		s.connection = nil
	}
}

// read takes one event: true when it is a piece.
func (s *Stream) read(gateway string) (bool, error) {
	if s.connection == nil {
		connection, err := s.open(gateway)
		if err != nil {
			return false, err
		}
		s.connection = connection
	}
	data, id, err := s.connection.event(s.client.Timeout)
	if err != nil {
		return false, err
	}
	if data == "[DONE]" {
		s.done = true
		return false, nil
	}
	return true, s.take(data, id)
}

func (s *Stream) take(data, id string) error {
	var chunk struct {
		ID      string     `json:"id"`
		Error   *errorBody `json:"error"`
		Choices []struct {
			Index int    `json:"index"`
			Text  string `json:"text"`
			Delta struct {
				Content string `json:"content"`
			} `json:"delta"`
			FinishReason string `json:"finish_reason"`
		} `json:"choices"`
	}
	if err := json.Unmarshal([]byte(data), &chunk); err != nil {
		return &Error{Message: fmt.Sprintf("An event of the stream is not a chunk: %v.", err)}
	}
	if chunk.Error != nil {
		return refused(*chunk.Error, 0)
	}
	s.cursor = Cursor{chunk.ID, id}
	s.piece = Piece{Position: id, Chunk: json.RawMessage(data)}
	if len(chunk.Choices) > 0 { // one at most, as OpenAI has it
		choice := chunk.Choices[0]
		s.piece.Text, s.piece.Choice = choice.Text+choice.Delta.Content, choice.Index
		s.piece.FinishReason = choice.FinishReason
	}
	return nil
}

// open connects behind what has been taken.
func (s *Stream) open(gateway string) (*connection, error) {
	ask := s.begin
	if s.cursor.Generation != "" {
		ask = request{method: "GET", path: pathOf(s.cursor.Generation) + "/stream", headers: map[string]string{}}
		if s.cursor.Position != "" {
			ask.headers["Last-Event-ID"] = s.cursor.Position
		}
	}
	ctx, cancel := context.WithCancel(s.ctx)
	watch := time.AfterFunc(s.client.Timeout, cancel)
	answer, err := s.client.open(ctx, gateway, ask)
	watch.Stop()
	if err != nil {
		cancel()
		return nil, s.judged(err, gateway)
	}
	lines := bufio.NewScanner(answer.Body)
	lines.Buffer(nil, longestEvent)
	return &connection{gateway, answer, lines, cancel}, nil
}

// judged: a generation that has failed or was cancelled says so for ever: trying again would not end.
func (s *Stream) judged(err error, gateway string) error {
	var refusal *Error
	if s.cursor.Generation == "" || !errors.As(err, &refusal) || !refusal.Again {
		return err
	}
	var state State
	ask := request{method: "GET", path: pathOf(s.cursor.Generation)}
	if err := s.client.jsonAt(s.ctx, gateway, ask, s.client.Timeout, &state); err != nil {
		return err
	}
	refusal.Again = state.Status != "failed" && state.Status != "cancelled"
	return refusal
}

type connection struct {
	gateway string
	answer  *http.Response
	lines   *bufio.Scanner
	cancel  context.CancelFunc
}

func (c *connection) close() {
	c.cancel()
	c.answer.Body.Close()
}

// event is the next whole one that has data: it counts when the blank line behind it is there.
func (c *connection) event(timeout time.Duration) (data, id string, err error) {
	watch := time.AfterFunc(timeout, c.cancel)
	defer watch.Stop()
	var parts []string
	for c.lines.Scan() {
		watch.Reset(timeout)
		field, value, _ := strings.Cut(c.lines.Text(), ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case c.lines.Text() == "" && parts != nil:
			return strings.Join(parts, "\n"), id, nil
		case field == "data":
			parts = append(parts, value)
		case field == "id":
			id = value
		}
	}
	if err := c.lines.Err(); err != nil {
		return "", "", err
	}
	return "", "", io.ErrUnexpectedEOF
}
