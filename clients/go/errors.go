package ryzanstein

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// ErrLost is what errors wrap when no gateway could be reached, or each was lost, for as long as the client's patience.
var ErrLost = errors.New("connection lost")

// Error is what the server refuses, in OpenAI's shape.
type Error struct {
	Message string
	Type    string
	Code    string
	Param   string
	// Status is HTTP's; 0 for an error in the middle of a stream.
	Status    int
	RequestID string
	// RetryAfter is 0 where the server has not said.
	RetryAfter time.Duration
	// Again: the same request may succeed later, or elsewhere.
	Again bool
}

func (e *Error) Error() string {
	if e.Status == 0 {
		return fmt.Sprintf("%s (%s)", e.Message, e.Code)
	}
	return fmt.Sprintf("%s (%d %s)", e.Message, e.Status, e.Code)
}

type errorBody struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Code    string  `json:"code"`
	Param   *string `json:"param"`
}

// refused makes an Error of the object `error` of an answer, or of an event, whose status is 0.
func refused(found errorBody, status int) *Error {
	refusal := &Error{Message: found.Message, Type: found.Type, Code: found.Code, Status: status}
	if found.Param != nil {
		refusal.Param = *found.Param
	}
	switch status {
	case 0: // about this gateway, and another one goes on
		refusal.Again = found.Code == "unavailable" || found.Code == "broker_unavailable"
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable:
		refusal.Again = true
	}
	return refusal
}

// refusal makes an Error of an answer that is not a success, whatever a proxy on the way has made of it.
func refusal(answer *http.Response, content []byte) *Error {
	var body struct {
		Error *errorBody `json:"error"`
	}
	if err := json.Unmarshal(content, &body); err != nil || body.Error == nil {
		message := fmt.Sprintf("The server answered %s, and not with an error of OpenAI's shape.", answer.Status)
		body.Error = &errorBody{Message: message}
	}
	found := refused(*body.Error, answer.StatusCode)
	found.RequestID = answer.Header.Get("X-Request-Id")
	if seconds, err := strconv.ParseUint(answer.Header.Get("Retry-After"), 10, 30); err == nil {
		found.RetryAfter = time.Duration(seconds) * time.Second
	}
	return found
}

func worthAnotherTry(err error) bool {
	var refusal *Error
	return errors.Is(err, ErrLost) || errors.As(err, &refusal) && refusal.Again
}
