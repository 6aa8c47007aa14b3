// SPDX-License-Identifier: Apache-2.0

package inference

import (
	"errors"
	"fmt"
	"net/http"
	"time"
)

// Code names one way in which Headgate itself refuses or ends a request. It is
// what clients see as error.code and Headgate-Reason and what metrics carry as
// a label: a closed set.
type Code string

// Codes. The table below gives each its HTTP status.
const (
	InvalidJSON          Code = "invalid_json"
	MissingModel         Code = "missing_model"
	InvalidRequest       Code = "invalid_request"
	UnsupportedMediaType Code = "unsupported_media_type"
	Unauthorized         Code = "unauthorized"
	Forbidden            Code = "forbidden"
	ModelNotFound        Code = "model_not_found"
	NotFound             Code = "not_found"
	MethodNotAllowed     Code = "method_not_allowed"
	RequestInProgress    Code = "request_in_progress"
	KeyReused            Code = "idempotency_key_reused"
	KeyUnavailable       Code = "idempotency_unavailable"
	AttemptsExhausted    Code = "attempts_exhausted"
	RequestTooLarge      Code = "request_too_large"
	HeadersTooLarge      Code = "headers_too_large"
	QueueFull            Code = "queue_full"
	Shed                 Code = "shed"
	RateLimited          Code = "rate_limited"
	QueueTimeout         Code = "queue_timeout"
	DeadlineExceeded     Code = "deadline_exceeded"
	NoEndpoints          Code = "no_endpoints"
	UpstreamFailed       Code = "upstream_failed"
	SourceNotFenced      Code = "source_not_fenced"
	RetryBudgetExhausted Code = "retry_budget_exhausted"
	RetryTooExpensive    Code = "retry_too_expensive"
	PoisonRequest        Code = "poison_request"
	ToolEffectsUnknown   Code = "tool_effects_unknown"
	UpstreamTimeout      Code = "upstream_timeout"
	DecodeInterrupted    Code = "upstream_decode_interrupted"
	JournalUnavailable   Code = "journal_unavailable"
	ShuttingDown         Code = "shutting_down"
	Internal             Code = "internal"
)

// A CodeInfo is one row of the error table.
type CodeInfo struct {
	Status    int           // HTTP status before any byte was sent; 0: only ever an in-stream event
	Type      string        // error.type in the OpenAI shape
	Retryable bool          // the same request may be sent again without anything happening twice
	Wait      time.Duration // default Retry-After; 0: none is sent
}

// Why 400 for refusals that must not be repeated: SDKs retry by status.
// openai-node and openai-go resend 408, 409, 429 and 5xx, the AI SDK the same
// whatever x-should-retry says, and langchain all but 400-407, 409 and 413.
var codes = map[Code]CodeInfo{
	InvalidJSON:          {http.StatusBadRequest, "invalid_request_error", false, 0},
	MissingModel:         {http.StatusBadRequest, "invalid_request_error", false, 0},
	InvalidRequest:       {http.StatusBadRequest, "invalid_request_error", false, 0},
	UnsupportedMediaType: {http.StatusUnsupportedMediaType, "invalid_request_error", false, 0},
	Unauthorized:         {http.StatusUnauthorized, "authentication_error", false, 0},
	Forbidden:            {http.StatusForbidden, "permission_error", false, 0},
	ModelNotFound:        {http.StatusNotFound, "invalid_request_error", false, 0},
	NotFound:             {http.StatusNotFound, "invalid_request_error", false, 0},
	MethodNotAllowed:     {http.StatusMethodNotAllowed, "invalid_request_error", false, 0},
	RequestInProgress:    {http.StatusConflict, "conflict_error", true, time.Second},
	KeyReused:            {http.StatusBadRequest, "invalid_request_error", false, 0},
	KeyUnavailable:       {http.StatusBadRequest, "invalid_request_error", false, 0},
	AttemptsExhausted:    {http.StatusBadRequest, "upstream_error", false, 0},
	RequestTooLarge:      {http.StatusRequestEntityTooLarge, "invalid_request_error", false, 0},
	HeadersTooLarge:      {http.StatusRequestHeaderFieldsTooLarge, "invalid_request_error", false, 0},
	QueueFull:            {http.StatusTooManyRequests, "overloaded_error", true, time.Second},
	Shed:                 {http.StatusTooManyRequests, "overloaded_error", true, time.Second},
	RateLimited:          {http.StatusTooManyRequests, "rate_limit_error", true, time.Second},
	QueueTimeout:         {http.StatusTooManyRequests, "overloaded_error", true, time.Second},
	DeadlineExceeded:     {http.StatusGatewayTimeout, "timeout_error", true, 0},
	NoEndpoints:          {http.StatusServiceUnavailable, "upstream_error", true, time.Second},
	UpstreamFailed:       {http.StatusBadGateway, "upstream_error", true, 0},
	SourceNotFenced:      {http.StatusServiceUnavailable, "upstream_error", true, time.Second},
	RetryBudgetExhausted: {http.StatusServiceUnavailable, "upstream_error", true, time.Second},
	RetryTooExpensive:    {http.StatusServiceUnavailable, "upstream_error", true, time.Second},
	PoisonRequest:        {http.StatusBadRequest, "invalid_request_error", false, 0},
	ToolEffectsUnknown:   {http.StatusBadRequest, "upstream_error", false, 0},
	UpstreamTimeout:      {http.StatusGatewayTimeout, "timeout_error", true, 0},
	DecodeInterrupted:    {0, "upstream_error", false, 0},
	JournalUnavailable:   {http.StatusServiceUnavailable, "upstream_error", true, time.Second},
	ShuttingDown:         {http.StatusServiceUnavailable, "upstream_error", true, time.Second},
	Internal:             {http.StatusInternalServerError, "internal_error", false, 0},
}

// Info returns the code's row. A code outside the table reads as Internal.
func (c Code) Info() CodeInfo {
	if info, ok := codes[c]; ok {
		return info
	}
	return codes[Internal]
}

// Codes returns every code, in no order.
func Codes() []Code {
	all := make([]Code, 0, len(codes))
	for c := range codes {
		all = append(all, c)
	}
	return all
}

// RetryAfterMax bounds every Retry-After that reaches a client, an engine's own
// included: openai-node sleeps any value, deaf to its caller's abort.
const RetryAfterMax = 30 * time.Second

// Error is the one error type whose text may reach a client.
type Error struct {
	Code       Code
	Message    string        // for the client: no internal addresses, no secrets
	Status     int           // overrides the table's HTTP status when not 0
	RetryAfter time.Duration // overrides the table's wait when not 0; clamped by RetryAfterMax
	Allow      string        // of MethodNotAllowed: the methods that are (RFC 9110 §15.5.6)
	Err        error         // for logs only
}

func (e *Error) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("%s: %s: %v", e.Code, e.Message, e.Err)
	}
	return fmt.Sprintf("%s: %s", e.Code, e.Message)
}

func (e *Error) Unwrap() error { return e.Err }

// HTTPStatus is the status with which the error is answered before any byte of
// an answer was sent.
func (e *Error) HTTPStatus() int {
	if e.Status != 0 {
		return e.Status
	}
	return e.Code.Info().Status
}

// Wait is how long the client should wait before it sends the request again,
// between 0 (no hint) and RetryAfterMax.
func (e *Error) Wait() time.Duration {
	wait := e.RetryAfter
	if wait == 0 {
		wait = e.Code.Info().Wait
	}
	return min(wait, RetryAfterMax)
}

// Errorf makes an Error with a message for the client. What is for logs only
// goes into its Err field.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// AsError finds the Error in err's chain; anything else becomes Internal, and
// its text stays out of the message.
func AsError(err error) *Error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	return &Error{Code: Internal, Message: "internal error", Err: err}
}
