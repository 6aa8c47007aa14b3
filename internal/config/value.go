// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/headgate/headgate/internal/fleet"
)

// A value reads itself from the text of one scalar. Its errors never carry a
// secret.
type value interface{ set(text string) error }

// Duration is a length of time with its unit: 250ms, 60s, 10m, 1h30m.
type Duration time.Duration

func (d Duration) String() string {
	s := time.Duration(d).String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(s, zero) {
			s = s[:len(s)-2]
		}
	}
	return s
}

func (d *Duration) set(text string) error {
	n, err := time.ParseDuration(text)
	if err != nil {
		if _, bare := strconv.ParseFloat(text, 64); bare == nil {
			return fmt.Errorf("%s is a bare number: a duration needs a unit, as in 250ms, 60s or 10m", quote(text))
		}
		return fmt.Errorf("%s is not a duration: write it as in 250ms, 60s, 10m or 1h30m", quote(text))
	}
	if n < 0 {
		return fmt.Errorf("%s is negative", quote(text))
	}
	*d = Duration(n)
	return nil
}

// Size is a number of bytes: 64MiB, 10MB, or bare bytes.
type Size int64

var sizeUnits = []struct {
	name string
	n    int64
}{
	{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10},
	{"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}, {"B", 1},
}

func (s Size) String() string {
	for _, u := range sizeUnits {
		if s != 0 && u.n > 1 && int64(s)%u.n == 0 {
			return strconv.FormatInt(int64(s)/u.n, 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

func (s *Size) set(text string) error {
	digits := strings.TrimLeft(text, "0123456789")
	digits = text[:len(text)-len(digits)]
	unit, factor := text[len(digits):], int64(0)
	for _, u := range sizeUnits {
		if unit == u.name || unit == "" {
			factor = u.n
		}
	}
	if digits == "" || factor == 0 {
		return fmt.Errorf("%s is not a size: write it as in 512KiB, 64MiB, 10MB or in bare bytes", quote(text))
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n > math.MaxInt64/factor {
		return fmt.Errorf("%s is larger than any size can be", quote(text))
	}
	*s = Size(n * factor)
	return nil
}

// Ratio is a number from 0 to 1.
type Ratio float64

func (r Ratio) String() string { return strconv.FormatFloat(float64(r), 'g', -1, 64) }

func (r *Ratio) set(text string) error {
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(n) || math.IsInf(n, 0) {
		return fmt.Errorf("%s is not a number from 0 to 1", quote(text))
	}
	*r = Ratio(n)
	return nil
}

// Count is a number of things, or 0 for auto: whatever turns out right.
type Count int

func (c Count) String() string {
	if c == 0 {
		return "auto"
	}
	return strconv.Itoa(int(c))
}

func (c *Count) set(text string) error {
	if text == "auto" {
		*c = 0
		return nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > countMax {
		return fmt.Errorf("%s is not auto or a whole number from 1 to %d", quote(text), countMax)
	}
	*c = Count(n)
	return nil
}

const countMax = 1_000_000

// Trust says whether headers that change how a request is treated count.
type Trust string

// Values of Trust.
const (
	TrustAuto  Trust = "auto"
	TrustTrue  Trust = "true"
	TrustFalse Trust = "false"
)

func (t *Trust) set(text string) error {
	switch v := Trust(text); v {
	case TrustAuto, TrustTrue, TrustFalse:
		*t = v
		return nil
	}
	return fmt.Errorf("must be auto, true or false, not %s", quote(text))
}

// Address is a TCP address to listen on, as host:port; an IPv6 host is in
// brackets and an empty host is every interface. An empty address is none.
type Address string

func (a *Address) set(text string) error {
	if text == "" {
		*a = ""
		return nil
	}
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return fmt.Errorf("%s is not an address: write it as host:port, [::1]:8080 or :8080", quote(text))
	}
	if _, err := portNumber(port); err != nil {
		return err
	}
	if host != "" {
		if host, err = canonicalHost(host); err != nil {
			return err
		}
	}
	*a = Address(net.JoinHostPort(host, port))
	return nil
}

// GuardAddress is host:port of a guard's control port, auto, or "" for no guard.
type GuardAddress string

func (g *GuardAddress) set(text string) error {
	if text == "" || text == GuardAuto {
		*g = GuardAddress(text)
		return nil
	}
	var a Address
	if err := a.set(text); err != nil || strings.HasPrefix(text, ":") {
		return fmt.Errorf("%s is not a guard: write auto, or its control port as host:port", quote(text))
	}
	*g = GuardAddress(a)
	return nil
}

// Loopback reports whether only this machine can reach the address.
func (a Address) Loopback() bool {
	host, _, err := net.SplitHostPort(string(a))
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// overlaps reports whether a and b can't both be listened on.
func (a Address) overlaps(b Address) bool {
	hostA, portA, errA := net.SplitHostPort(string(a))
	hostB, portB, errB := net.SplitHostPort(string(b))
	if errA != nil || errB != nil || portA != portB || portA == "0" {
		return false
	}
	every := func(host string) bool { return host == "" || host == "0.0.0.0" || host == "::" }
	return hostA == hostB || every(hostA) || every(hostB)
}

// URL is the base address of an engine in canonical form: scheme://host:port,
// lower case, with the port written out and an IPv6 host in brackets. It is
// also the endpoint's identity.
type URL string

func (u *URL) set(text string) error {
	// The text may hold a password, so that no message repeats it.
	p, err := url.Parse(text)
	if err != nil {
		return errors.New("is not a URL: write it as http://host:port")
	}
	switch {
	case p.Scheme != "http" && p.Scheme != "https":
		return errors.New("must begin with http:// or https://")
	case p.User != nil:
		return errors.New("must not hold a user or password: use the pool's credential")
	case p.RawQuery != "" || p.ForceQuery || p.Fragment != "" || strings.HasSuffix(text, "#"):
		return errors.New("must not have a query or fragment")
	case p.Hostname() == "":
		return errors.New("has no host: write it as http://host:port")
	case p.Path != "" && p.Path != "/":
		return errors.New("must not have a path: requests keep their own, as in /v1/chat/completions")
	}
	port := p.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[p.Scheme]
	}
	n, err := portNumber(port)
	if err != nil {
		return err
	}
	if n == 0 {
		return errors.New("port 0 can't be connected to")
	}
	host, err := canonicalHost(p.Hostname())
	if err != nil {
		return err
	}
	if strings.Contains(host, "%") {
		return errors.New("must not have an IPv6 zone")
	}
	base := &url.URL{Scheme: p.Scheme, Host: net.JoinHostPort(host, strconv.Itoa(n))}
	*u = URL(fleet.NewEndpoint(base, "").URL)
	return nil
}

// HookURL is the address of a webhook: scheme, host, path and query.
type HookURL string

func (u *HookURL) set(text string) error {
	p, err := url.Parse(text)
	if err != nil {
		return errors.New("is not a URL: write it as http://host:port/path")
	}
	switch {
	case p.Fragment != "" || strings.HasSuffix(text, "#"):
		return errors.New("must not have a fragment")
	case p.User != nil:
		return errors.New("must not hold a user or password: use bearer_file")
	}
	var base URL
	if err := base.set((&url.URL{Scheme: p.Scheme, Host: p.Host}).String()); err != nil {
		return err
	}
	*u = HookURL(string(base) + (&url.URL{Path: cmp.Or(p.Path, "/"), RawPath: p.RawPath, RawQuery: p.RawQuery}).String())
	return nil
}

func portNumber(text string) (int, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || text != strconv.FormatUint(n, 10) {
		return 0, fmt.Errorf("port %s is not a number from 0 to 65535", quote(text))
	}
	return int(n), nil
}

// canonicalHost lower-cases a host name and shortens an IPv6 address, or makes
// it the IPv4 address that it stands for.
func canonicalHost(host string) (string, error) {
	if ip, err := netip.ParseAddr(host); err == nil {
		return ip.Unmap().String(), nil
	}
	host = strings.ToLower(host)
	if strings.ContainsFunc(host, notHostRune) || len(host) > 253 {
		return "", fmt.Errorf("host %s is neither a name nor an IP address", quote(host))
	}
	return host, nil
}

func notHostRune(r rune) bool {
	return !(r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-' || r == '.' || r == '_')
}

// File is the path of a file. Parse makes it relative to the folder of the
// configuration file.
type File string

// redacted stands for a secret wherever values are printed.
const redacted = "[redacted]"

// Secret is a text that is never printed: whatever formats, marshals or logs it
// gets "[redacted]", or "" when it is empty. Reveal returns the text.
type Secret struct{ text string }

// NewSecret returns a secret that holds text.
func NewSecret(text string) Secret { return Secret{text} }

// Reveal returns the secret itself.
func (s Secret) Reveal() string { return s.text }

// IsZero reports whether there is no secret.
func (s Secret) IsZero() bool { return s.text == "" }

// Equal reports whether both secrets hold the same text.
func (s Secret) Equal(o Secret) bool { return s == o }

func (s Secret) String() string {
	if s.text == "" {
		return ""
	}
	return redacted
}

// Format prints the redacted form for every verb, %#v and %x included.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprint(f, s.String()) }

// MarshalText is the redacted form, for JSON and YAML too.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// LogValue is the redacted form.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

func (s *Secret) set(text string) error {
	s.text = text
	return nil
}

// Digest is the SHA-256 of an API key. It is never printed either: a short key
// can be found from it.
type Digest struct{ hex string }

// NewDigest returns the digest of an API key.
func NewDigest(key string) Digest {
	sum := sha256.Sum256([]byte(key))
	return Digest{hex.EncodeToString(sum[:])}
}

// Hex is the digest in lower-case hexadecimal digits, "" where there is none.
func (d Digest) Hex() string { return d.hex }

// IsZero reports whether there is no digest.
func (d Digest) IsZero() bool { return d.hex == "" }

// Equal reports whether both are the same digest.
func (d Digest) Equal(o Digest) bool { return d == o }

func (d Digest) String() string {
	if d.hex == "" {
		return ""
	}
	return redacted
}

// Format prints the redacted form for every verb.
func (d Digest) Format(f fmt.State, _ rune) { fmt.Fprint(f, d.String()) }

// MarshalText is the redacted form, for JSON and YAML too.
func (d Digest) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// LogValue is the redacted form.
func (d Digest) LogValue() slog.Value { return slog.StringValue(d.String()) }

func (d *Digest) set(text string) error {
	// The text may be the key itself, so that no message repeats it.
	raw, err := hex.DecodeString(text)
	if err != nil || len(raw) != sha256.Size {
		return fmt.Errorf("must be the key's SHA-256 in %d hexadecimal digits", 2*sha256.Size)
	}
	d.hex = hex.EncodeToString(raw)
	return nil
}
