#!/bin/sh
# Writes the digest of every image that is named by a tag here, in compose.yaml and the Dockerfile,
# behind its tag: name:tag@sha256:… Needs skopeo and registries that answer; run again after a tag
# was changed.
set -eu
cd "$(dirname "$0")"
command -v skopeo >/dev/null || {
    echo "pin-images: skopeo is missing; Debian: apt-get install skopeo" >&2
    exit 1
}

images=$(sed -nE 's/^ *image: ([^ @]+:[^ @]+)(@.*)?$/\1/p; s/^ARG PYTHON_IMAGE=([^@]+)(@.*)?$/\1/p' \
    compose.yaml Dockerfile | sort -u)
for image in $images; do
    digest=$(skopeo inspect --format '{{.Digest}}' "docker://$image") || {
        echo "pin-images: the digest of $image could not be had; nothing was written for it" >&2
        exit 1
    }
    sed -i -E "s#^( *image: |ARG PYTHON_IMAGE=)$image(@sha256:[0-9a-f]+)?\$#\\1$image@$digest#" \
        compose.yaml Dockerfile
    echo "$image@$digest"
done
