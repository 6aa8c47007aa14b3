// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/dialecttest"
)

var rewrite = flag.Bool("rewrite", false, "write the snapshots anew; read the diff")

func TestTrafficOfEngines(t *testing.T) {
	var write func(name string, text []byte) error
	if *rewrite {
		write = func(name string, text []byte) error {
			return os.WriteFile(filepath.Join("testdata", name), text, 0o644)
		}
	}
	dialecttest.Run(t, map[string]dialect.Dialect{
		"chat": Chat, "completions": Completions, "responses": Responses, "embeddings": Embeddings,
		"rerank": Rerank, "score": Score, "tokenize": Tokenize, "detokenize": Detokenize,
		"speech": Speech, "transcriptions": Transcriptions,
	}, os.DirFS("testdata"), write)
}
