// Search runs in a worker, and browsers start none from file://. There, a hidden frame takes the worker's place, with the
// part of a worker's interface that the theme uses. Without this file the theme would load its own from a CDN.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = (this.inside = this.frame.contentWindow)
      this.listener = event => event.source === inside && this.onmessage?.({ data: event.data })
      addEventListener("message", this.listener)
      this.ready = new Promise(resolve => (inside.started = resolve))
      inside.document.open()
      inside.document.write(`<body><script>
        postMessage = data => parent.postMessage(data, "*")
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(resolve => {
          const script = document.createElement("script")
          script.src = url
          script.onload = resolve
          document.body.appendChild(script)
        })), Promise.resolve())
      </script><script src="${url}" onload="started()"></script></body>`)
      inside.document.close()
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })))
    }
    terminate() {
      removeEventListener("message", this.listener)
      this.frame.remove()
    }
  }
}
