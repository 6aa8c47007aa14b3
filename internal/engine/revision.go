// SPDX-License-Identifier: Apache-2.0

package engine

import "encoding/json"

// RevisionPath is where engines of a kind tell which revision of its model they
// serve, "" for those that don't.
func (k Kind) RevisionPath() string {
	switch k {
	case SGLang:
		return "/get_server_info"
	case TGI:
		return "/info"
	}
	return ""
}

// Revision reads what RevisionPath answers: the model and its revision, or "" if
// it was started without a certain one.
func (k Kind) Revision(answer []byte) string {
	var says struct {
		ModelPath string `json:"model_path"` // SGLang
		Revision  string `json:"revision"`
		ModelID   string `json:"model_id"` // TGI
		ModelSHA  string `json:"model_sha"`
	}
	if json.Unmarshal(answer, &says) != nil {
		return ""
	}
	model, revision := says.ModelPath, says.Revision
	if k == TGI {
		model, revision = says.ModelID, says.ModelSHA
	}
	if model == "" || revision == "" || len(model)+len(revision) > revisionMax {
		return ""
	}
	return model + "@" + revision
}

// revisionMax bounds what is kept of an engine's word.
const revisionMax = 512
